//! NVRTC: CUDA C++ to machine code for sm_90a, in this process.

use std::ffi::{CString, c_char};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::nvrtc::{result, sys};
use rayon::prelude::*;

use crate::error::Error;
use crate::sonic::gpu::absence::Absence;

use super::cubin::Cubin;
use super::sources::HEADERS;
use super::variant::Variant;

/// NVRTC, found and of a known version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Compiler {
    major: u32,
    minor: u32,
}

/// A compiled kernel and what the compiler said.
pub struct Compiled {
    /// The machine code.
    pub cubin: Cubin,
    /// The log: errors and warnings, and ptxas on registers and spills.
    pub log: String,
}

impl Compiler {
    /// Looks for NVRTC where `SONICMOE_NVRTC` says (the library or its folder), in the active Python
    /// environment, then where the system looks.
    ///
    /// # Errors
    /// None is there, or it does not answer.
    pub fn find() -> Result<Self, Absence> {
        let named = std::env::var_os("SONICMOE_NVRTC").map(PathBuf::from);
        Self::find_at(named.as_deref())
    }

    /// As [`Compiler::find`], with the path given. A process uses the first NVRTC that it loads.
    ///
    /// # Errors
    /// As [`Compiler::find`]; also a `path` that holds no NVRTC.
    pub fn find_at(path: Option<&Path>) -> Result<Self, Absence> {
        if let Some(path) = path {
            let libraries = libraries_at(path);
            if libraries.is_empty() {
                return Err(Absence::NoCompilerAt { path: path.display().to_string() });
            }
            preload(&libraries);
        } else if let Some(libraries) =
            environment_folders().map(|folder| libraries_at(&folder)).find(|l| !l.is_empty())
        {
            preload(&libraries);
        }
        // SAFETY: loads a library by name and runs its initialisers; libnvrtc's have no conditions.
        if !unsafe { sys::is_culib_present() } {
            return Err(Absence::NoCompiler);
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid for a write; the library is present.
        let answer = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        match (answer.result(), u32::try_from(major), u32::try_from(minor)) {
            (Ok(()), Ok(major), Ok(minor)) => Ok(Self { major, minor }),
            (Err(error), ..) => Err(Absence::CompilerFails { reason: error.to_string() }),
            _ => Err(Absence::CompilerFails { reason: format!("it calls itself version {major}.{minor}") }),
        }
    }

    /// Compiles one variant.
    ///
    /// # Errors
    /// The compiler's log, if it refuses the source or does not know sm_90a.
    pub fn compile(&self, variant: &Variant) -> crate::Result<Compiled> {
        let program = Program::new(variant).map_err(|error| self.failed(variant, &error.to_string(), ""))?;
        let options = variant.options();
        // SAFETY: the program is alive and was made by nvrtcCreateProgram. No option holds a 0.
        let answer = unsafe { result::compile_program(program.raw, &options) };
        let log = program.log();
        answer.map_err(|error| self.failed(variant, &error.to_string(), &log))?;
        let bytes = program.cubin().map_err(|error| self.failed(variant, &error.to_string(), &log))?;
        let cubin = Cubin::new(bytes)?;
        if !cubin.defines(variant.kernel().name())? {
            return Err(self.failed(variant, "the result lacks the entry point", &log));
        }
        Ok(Compiled { cubin, log })
    }

    /// Compiles several variants, as many at a time as rayon has threads.
    ///
    /// # Errors
    /// The first variant's that fails, in the order given.
    pub fn compile_all(&self, variants: &[Variant]) -> crate::Result<Vec<Compiled>> {
        variants.par_iter().map(|variant| self.compile(variant)).collect::<Vec<_>>().into_iter().collect()
    }

    fn failed(&self, variant: &Variant, reason: &str, log: &str) -> Error {
        Error::device(format!("NVRTC {self} cannot compile {variant}: {reason}\n{log}"))
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// An NVRTC program, destroyed when dropped.
struct Program {
    raw: sys::nvrtcProgram,
    /// NVRTC may refer to the texts until the program is destroyed.
    _texts: Vec<CString>,
}

impl Program {
    fn new(variant: &Variant) -> Result<Self, result::NvrtcError> {
        let source = variant.kernel().source();
        let text = |text: &str| {
            CString::new(text).map_err(|_| result::NvrtcError(sys::nvrtcResult::NVRTC_ERROR_INVALID_INPUT))
        };
        let mut texts = vec![text(source.text)?, text(source.path)?];
        for header in HEADERS {
            texts.extend([text(header.text)?, text(header.path)?]);
        }
        let headers: Vec<*const c_char> = texts[2..].iter().step_by(2).map(|text| text.as_ptr()).collect();
        let names: Vec<*const c_char> = texts[3..].iter().step_by(2).map(|text| text.as_ptr()).collect();
        let mut raw = ptr::null_mut();
        // SAFETY: every pointer is to a C string that lives as long as the program; `headers` and
        // `names` have the length given.
        unsafe {
            sys::nvrtcCreateProgram(
                &mut raw,
                texts[0].as_ptr(),
                texts[1].as_ptr(),
                headers.len() as i32,
                headers.as_ptr(),
                names.as_ptr(),
            )
        }
        .result()?;
        Ok(Self { raw, _texts: texts })
    }

    fn log(&self) -> String {
        // SAFETY: the program is alive.
        let log = unsafe { result::get_program_log(self.raw) }.unwrap_or_default();
        let bytes: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut size = 0;
        // SAFETY: the program is alive and `size` is valid for a write.
        unsafe { sys::nvrtcGetCUBINSize(self.raw, &mut size) }.result()?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the buffer has the size that NVRTC asked for.
        unsafe { sys::nvrtcGetCUBIN(self.raw, bytes.as_mut_ptr().cast()) }.result()?;
        Ok(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by nvrtcCreateProgram, destroyed once; an error would leave nothing to do.
        let _ = unsafe { result::destroy_program(self.raw) };
    }
}

/// The library folders of an active Python or Conda environment: where pip puts NVRTC, and where the
/// system does not look.
fn environment_folders() -> impl Iterator<Item = PathBuf> {
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    environments.flat_map(|root| {
        let pythons = std::fs::read_dir(root.join("lib")).into_iter().flatten().flatten().map(|entry| entry.path());
        let packages = pythons.flat_map(|python| {
            ["cu13", "cuda_nvrtc"].map(|package| python.join("site-packages/nvidia").join(package).join("lib"))
        });
        packages.chain([root.join("lib")]).collect::<Vec<_>>()
    })
}

/// NVRTC's files at a path: the library that it loads itself first.
fn libraries_at(path: &Path) -> Vec<PathBuf> {
    let folder = if path.is_dir() { Some(path) } else { path.parent() };
    let mut files: Vec<PathBuf> = folder
        .and_then(|folder| std::fs::read_dir(folder).ok())
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|file| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libnvrtc") && name.contains(".so") && !name.contains(".alt.")
        })
        .collect();
    files.sort();
    let (mut builtins, libraries): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|file| file.to_string_lossy().contains("libnvrtc-builtins"));
    let library = if path.is_dir() { libraries.into_iter().next() } else { libraries.into_iter().find(|l| l == path) };
    match library {
        Some(library) => {
            builtins.push(library);
            builtins
        }
        None => Vec::new(),
    }
}

/// Loads libraries for good. A later load by name finds the one that is already there, which is how
/// a library outside the system's search path is found.
fn preload(libraries: &[PathBuf]) {
    for library in libraries {
        // SAFETY: runs the initialisers of NVIDIA's compiler library, which have no conditions. One
        // that cannot be loaded is reported by the search that follows.
        if let Ok(loaded) = unsafe { libloading::Library::new(library) } {
            std::mem::forget(loaded);
        }
    }
}
