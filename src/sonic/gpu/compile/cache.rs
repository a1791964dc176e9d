//! Compiled kernels on disk: carried along by the user, or kept from an earlier run.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rayon::prelude::*;

use crate::error::Error;
use crate::sonic::gpu::absence::Absence;

use super::compiler::Compiler;
use super::cubin::Cubin;
use super::variant::Variant;

/// Where a compiled kernel came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A folder that the user carried here.
    Carried,
    /// The cache of an earlier run.
    Cached,
    /// NVRTC, just now.
    Compiled,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Carried => "carried",
            Self::Cached => "cached",
            Self::Compiled => "compiled",
        })
    }
}

/// Folders of compiled kernels, and the compiler for what they lack.
///
/// A file is named after its kernel, a fingerprint of all that the compiler read, and the compiler's
/// version; so a stale one is never found. Processes may share a folder: a file appears whole or not
/// at all.
#[derive(Clone, Debug)]
pub struct CubinCache {
    carried: Vec<PathBuf>,
    own: Option<PathBuf>,
    compiler: Result<Compiler, Absence>,
}

impl CubinCache {
    /// Carried kernels from `SONICMOE_CUBIN_DIR` and from `cubins` beside the program; our own cache
    /// in `SONICMOE_CACHE_DIR`, or `sonicmoe` in the user's cache folder; NVRTC as
    /// [`Compiler::find`] finds it.
    pub fn find() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let beside = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.join("cubins")));
        let own = variable("SONICMOE_CACHE_DIR")
            .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("sonicmoe")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache/sonicmoe")));
        Self {
            carried: variable("SONICMOE_CUBIN_DIR").into_iter().chain(beside).collect(),
            own,
            compiler: Compiler::find(),
        }
    }

    /// A cache in one folder, filled by `compiler`.
    pub fn at(folder: impl Into<PathBuf>, compiler: Result<Compiler, Absence>) -> Self {
        Self { carried: Vec::new(), own: Some(folder.into()), compiler }
    }

    /// The folders looked through, carried ones first.
    pub fn folders(&self) -> impl Iterator<Item = &Path> {
        self.carried.iter().chain(&self.own).map(PathBuf::as_path)
    }

    /// The compiler, or why there is none.
    pub fn compiler(&self) -> Result<Compiler, Absence> {
        self.compiler.clone()
    }

    /// Whether [`CubinCache::get`] would find `variant` without compiling.
    pub fn holds(&self, variant: &Variant) -> Option<Found> {
        self.look_up(variant).map(|(_, found)| found)
    }

    /// A variant's machine code: carried, cached, or compiled now and then cached.
    ///
    /// # Errors
    /// It is nowhere and there is no compiler, or the compiler refuses it. A cache that cannot be
    /// written is no error: the next run compiles again.
    pub fn get(&self, variant: &Variant) -> crate::Result<(Cubin, Found)> {
        if let Some(found) = self.look_up(variant) {
            return Ok(found);
        }
        let compiler = self.compiler.clone().map_err(|absence| {
            Error::device(format!("kernel {variant} is not compiled yet, and there is {absence}"))
        })?;
        let cubin = compiler.compile(variant)?.cubin;
        if let Some(folder) = &self.own {
            let _ = write_whole(folder, &file_name(variant, &compiler.to_string()), cubin.bytes());
        }
        Ok((cubin, Found::Compiled))
    }

    /// Several variants, in parallel.
    ///
    /// # Errors
    /// As [`CubinCache::get`], of the first variant that fails in the order given.
    pub fn get_all(&self, variants: &[Variant]) -> crate::Result<Vec<(Cubin, Found)>> {
        variants.par_iter().map(|variant| self.get(variant)).collect::<Vec<_>>().into_iter().collect()
    }

    fn look_up(&self, variant: &Variant) -> Option<(Cubin, Found)> {
        let carried = self.carried.iter().find_map(|folder| read_any_version(folder, variant));
        if let Some(cubin) = carried {
            return Some((cubin, Found::Carried));
        }
        let own = self.own.as_ref()?;
        let cubin = match &self.compiler {
            Ok(compiler) => read(&own.join(file_name(variant, &compiler.to_string())), variant),
            Err(_) => read_any_version(own, variant),
        };
        cubin.map(|cubin| (cubin, Found::Cached))
    }
}

fn file_name(variant: &Variant, version: &str) -> String {
    format!("{}-{:032x}-nvrtc{version}.cubin", variant.kernel().name(), variant.fingerprint())
}

/// The newest compiler's result for exactly these sources.
fn read_any_version(folder: &Path, variant: &Variant) -> Option<Cubin> {
    let stem = file_name(variant, "");
    let stem = stem.trim_end_matches(".cubin");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(stem) && name.ends_with(".cubin")
        })
        .collect();
    files.sort();
    files.iter().rev().find_map(|file| read(file, variant))
}

/// A file that is damaged counts as absent.
fn read(file: &Path, variant: &Variant) -> Option<Cubin> {
    let cubin = Cubin::new(std::fs::read(file).ok()?).ok()?;
    cubin.defines(variant.kernel().name()).ok()?.then_some(cubin)
}

/// Writes beside the final name and renames, which replaces in one step.
fn write_whole(folder: &Path, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    static WRITTEN: AtomicU32 = AtomicU32::new(0);
    std::fs::create_dir_all(folder)?;
    let own = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let partial = folder.join(format!("{name}.{}-{own}.partial", std::process::id()));
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, folder.join(name)));
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written
}
