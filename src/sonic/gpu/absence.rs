//! Why there is no device to run on: a reason for each thing that may be missing.

use crate::error::Error;

/// What a machine lacks, and what to do about it. Nothing here is a fault of a problem or of the
/// crate: whoever meets one prints `skipped: …` and goes on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absence {
    /// No libcuda.
    #[error("no CUDA driver (libcuda) on this machine")]
    NoDriver,
    /// The driver is older than the calls that are made of it.
    #[error(
        "the CUDA driver is for CUDA {major}.{minor}; tensor maps and clusters need 12.4 or newer: update the driver"
    )]
    OldDriver {
        /// CUDA major version of the driver.
        major: u32,
        /// CUDA minor version of the driver.
        minor: u32,
    },
    /// The driver is there and does not start.
    #[error("the CUDA driver does not start: {reason}")]
    DriverFails {
        /// What it answered.
        reason: String,
    },
    /// A driver without devices.
    #[error("the CUDA driver sees no device")]
    NoDevice,
    /// A device number that does not exist.
    #[error("there is no CUDA device {ordinal}; the driver sees {count}")]
    NoSuchDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// Another architecture than Hopper.
    #[error(
        "device {ordinal} ({name}) has compute capability {major}.{minor}; the kernels use instructions that only 9.0 \
         has (H100, H200, GH200)"
    )]
    OtherArchitecture {
        /// The device.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Major compute capability.
        major: u32,
        /// Minor compute capability.
        minor: u32,
    },
    /// No libnvrtc.
    #[error(
        "no NVRTC (libnvrtc) on this machine: `pip install nvidia-cuda-nvrtc` and point SONICMOE_NVRTC at its lib \
         folder, or carry compiled kernels along in SONICMOE_CUBIN_DIR"
    )]
    NoCompiler,
    /// A path given for NVRTC that holds none.
    #[error("no libnvrtc in {path}, which SONICMOE_NVRTC or the caller names; it must be the library or its folder")]
    NoCompilerAt {
        /// The path.
        path: String,
    },
    /// NVRTC is there and does not answer.
    #[error("NVRTC does not start: {reason}")]
    CompilerFails {
        /// What it answered.
        reason: String,
    },
    /// No libcublas: no baseline to compare times with.
    #[error(
        "no cuBLAS (libcublas) on this machine: `pip install nvidia-cublas` and add its lib folder to LD_LIBRARY_PATH"
    )]
    NoBlas,
}

impl From<Absence> for Error {
    fn from(absence: Absence) -> Self {
        Self::device(absence.to_string())
    }
}
