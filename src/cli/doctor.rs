//! `sonicmoe doctor`: what this machine has for the CUDA path, what each part allows, and what to do
//! about what is missing.

use std::io::{self, Write};
use std::path::PathBuf;

use crate::error::Result;
use crate::sonic::gpu::compile::{CubinCache, Found, Variant};
use crate::sonic::gpu::device::{Properties, probe};
use crate::sonic::gpu::{Absence, Device};

/// Options of `sonicmoe doctor`.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = "\
Examples:
  sonicmoe doctor                       what is here, what is missing, and what to do about it
  sonicmoe doctor --compile cubins      every kernel, for a machine without NVRTC")]
pub struct Doctor {
    /// Compile every kernel into this folder; needs NVRTC and no GPU. On a machine without NVRTC,
    /// name the folder in SONICMOE_CUBIN_DIR
    #[arg(long, value_name = "FOLDER")]
    pub compile: Option<PathBuf>,
    /// Load every kernel on the device
    #[arg(long)]
    pub load: bool,
}

impl Doctor {
    /// Writes the report to `out`. A missing driver, device or library is part of the report and no
    /// error.
    ///
    /// # Errors
    /// A folder that cannot be written, a kernel that does not compile or load, or `out` that fails.
    pub fn run(&self, out: &mut dyn Write) -> Result<()> {
        let cache = CubinCache::find();
        let written = report(out, &cache);
        written.map_err(|error| crate::Error::io("the report", error))?;
        if let Some(folder) = &self.compile {
            let variants = Variant::all();
            let into = CubinCache::at(folder, cache.compiler());
            std::fs::create_dir_all(folder).map_err(|error| crate::Error::io(folder, error))?;
            let found = into.get_all(&variants)?;
            for (variant, (cubin, how)) in variants.iter().zip(found) {
                line(out, &how.to_string(), &format!("{variant}: {} bytes", cubin.bytes().len()))?;
            }
        }
        if self.load {
            match Device::open() {
                Ok(device) => {
                    for (variant, how) in device.prepare(&Variant::all())? {
                        line(out, "loaded", &format!("{variant} ({how})"))?;
                    }
                }
                Err(absence) => line(out, "skipped", &format!("loading kernels: {absence}"))?,
            }
        }
        Ok(())
    }
}

fn line(out: &mut dyn Write, label: &str, text: &str) -> Result<()> {
    write_line(out, label, text).map_err(|error| crate::Error::io("the report", error))
}

fn write_line(out: &mut dyn Write, label: &str, text: &str) -> io::Result<()> {
    writeln!(out, "{label:<10} {text}")
}

fn report(out: &mut dyn Write, cache: &CubinCache) -> io::Result<()> {
    let driver = probe::driver();
    match &driver {
        Ok((major, minor)) => write_line(out, "driver", &format!("CUDA {major}.{minor}"))?,
        Err(absence) => write_line(out, "driver", &missing(absence))?,
    }
    let devices = if driver.is_ok() { probe::devices() } else { Err(Absence::NoDevice) };
    let mut runs = false;
    match &devices {
        Ok(devices) => {
            for device in devices {
                write_line(out, "device", &describe(device))?;
                match device.require_hopper() {
                    Ok(()) => runs = true,
                    Err(absence) => write_line(out, "", &format!("not usable: {absence}"))?,
                }
            }
        }
        Err(_) if driver.is_err() => {}
        Err(absence) => write_line(out, "device", &missing(absence))?,
    }

    let compiler = cache.compiler();
    match &compiler {
        Ok(version) => {
            write_line(out, "NVRTC", &format!("{version}, compiles a kernel in about a second, at first use"))?
        }
        Err(absence) => write_line(out, "NVRTC", &missing(absence))?,
    }
    let variants = Variant::all();
    let held: Vec<Option<Found>> = variants.iter().map(|variant| cache.holds(variant)).collect();
    let count = |found| held.iter().filter(|&&held| held == Some(found)).count();
    let (carried, cached) = (count(Found::Carried), count(Found::Cached));
    let all = variants.len();
    write_line(
        out,
        "kernels",
        &format!("{all}: {carried} carried along, {cached} cached, {} to compile", all - carried - cached),
    )?;
    for folder in cache.folders() {
        let there = if folder.is_dir() { "" } else { " (not there)" };
        write_line(out, "", &format!("looks in {}{there}", folder.display()))?;
    }
    let blas = probe::blas();
    match &blas {
        Ok(()) => write_line(out, "cuBLAS", "found")?,
        Err(absence) => write_line(out, "cuBLAS", &missing(absence))?,
    }

    let complete = compiler.is_ok() || carried + cached == all;
    let yes_or_no = |answer| if answer { "yes" } else { "no" };
    write_line(out, "allows", "the CPU path, the reference and all checks of files: yes")?;
    write_line(out, "", &format!("compiling kernels for another machine: {}", yes_or_no(compiler.is_ok())))?;
    write_line(out, "", &format!("the CUDA path: {}", yes_or_no(runs && complete)))?;
    write_line(out, "", &format!("times against cuBLAS: {}", yes_or_no(runs && complete && blas.is_ok())))
}

fn describe(device: &Properties) -> String {
    let Properties { ordinal, name, compute_capability: (major, minor), multiprocessors, memory, shared_memory } =
        device;
    format!(
        "{ordinal}: {name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, {:.1} GiB, {} KiB of \
         shared memory a block",
        *memory as f64 / f64::from(1 << 30),
        shared_memory / 1024
    )
}

fn missing(absence: &Absence) -> String {
    format!("missing: {absence}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_names_every_part_on_any_machine() {
        let mut out = Vec::new();
        Doctor::default().run(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for part in ["driver", "NVRTC", "kernels", "cuBLAS", "allows"] {
            assert!(text.lines().any(|line| line.starts_with(part)), "no line for {part} in:\n{text}");
        }
    }
}
