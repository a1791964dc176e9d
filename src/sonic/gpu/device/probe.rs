//! What this machine has: driver, devices, cuBLAS. Nothing here panics or changes the machine.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute};

use crate::sonic::gpu::absence::Absence;

/// The oldest driver that has every call made of it: clusters and tensor maps came with CUDA 12.0,
/// the sizes of a kernel's parameters with 12.4.
const OLDEST_DRIVER: (u32, u32) = (12, 4);

/// The architecture of the kernels.
const HOPPER: (u32, u32) = (9, 0);

/// One device, as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Memory, bytes.
    pub memory: usize,
    /// Shared memory that a block may ask for, bytes.
    pub shared_memory: u32,
}

impl Properties {
    /// Whether the kernels run on it.
    ///
    /// # Errors
    /// It is of another architecture: their instructions exist neither on older nor on newer ones.
    pub fn require_hopper(&self) -> Result<(), Absence> {
        if self.compute_capability == HOPPER {
            return Ok(());
        }
        let (major, minor) = self.compute_capability;
        Err(Absence::OtherArchitecture { ordinal: self.ordinal, name: self.name.clone(), major, minor })
    }
}

/// The CUDA version of the driver, once it has started.
///
/// # Errors
/// No driver, one that is too old, or one that does not start.
pub fn driver() -> Result<(u32, u32), Absence> {
    // SAFETY: loads a library by name and runs its initialisers; libcuda's have no conditions.
    if !unsafe { sys::is_culib_present() } {
        return Err(Absence::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the pointer is valid for a write; the call needs no initialised driver.
    let answer = unsafe { sys::cuDriverGetVersion(&mut version) };
    answer.result().map_err(|error| Absence::DriverFails { reason: name_of(error) })?;
    let version = u32::try_from(version).unwrap_or(0);
    let (major, minor) = (version / 1000, version % 1000 / 10);
    if (major, minor) < OLDEST_DRIVER {
        return Err(Absence::OldDriver { major, minor });
    }
    match result::init() {
        Ok(()) => Ok((major, minor)),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Err(Absence::NoDevice),
        Err(error) => Err(Absence::DriverFails { reason: name_of(error) }),
    }
}

/// Every device of the driver.
///
/// # Errors
/// As [`driver`]; or a driver without devices.
pub fn devices() -> Result<Vec<Properties>, Absence> {
    driver()?;
    let fails = |error| Absence::DriverFails { reason: name_of(error) };
    let count = result::device::get_count().map_err(fails)?;
    if count <= 0 {
        return Err(Absence::NoDevice);
    }
    (0..count).map(|ordinal| properties(ordinal).map_err(fails)).collect()
}

/// One device.
///
/// # Errors
/// As [`devices`]; or a number that does not exist.
pub fn device(ordinal: usize) -> Result<Properties, Absence> {
    let devices = devices()?;
    let count = devices.len();
    devices.into_iter().nth(ordinal).ok_or(Absence::NoSuchDevice { ordinal, count })
}

/// Whether cuBLAS is there, the baseline for times.
///
/// # Errors
/// It is not.
pub fn blas() -> Result<(), Absence> {
    // SAFETY: loads a library by name and runs its initialisers; libcublas's have no conditions.
    if unsafe { cudarc::cublas::sys::is_culib_present() } { Ok(()) } else { Err(Absence::NoBlas) }
}

fn properties(ordinal: i32) -> Result<Properties, DriverError> {
    use CUdevice_attribute as Attribute;
    let device = result::device::get(ordinal)?;
    let attribute = |attribute| {
        // SAFETY: `device` came from the driver just now.
        unsafe { result::device::get_attribute(device, attribute) }.map(|value| u32::try_from(value).unwrap_or(0))
    };
    Ok(Properties {
        ordinal: ordinal as usize,
        name: result::device::get_name(device)?,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        // SAFETY: as above.
        memory: unsafe { result::device::total_mem(device) }?,
        shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    })
}

/// The driver's name for an error, with its explanation where it has one.
pub(in crate::sonic::gpu) fn name_of(error: DriverError) -> String {
    let code = format!("{:?}", error.0);
    // SAFETY of both calls inside cudarc: they look up static texts; libcuda is present, since it
    // answered with this error.
    match error.error_string() {
        Ok(text) => format!("{code}: {}", text.to_string_lossy()),
        Err(_) => code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, compute_capability: (u32, u32)) -> Properties {
        let name = name.into();
        Properties { ordinal: 0, name, compute_capability, multiprocessors: 148, memory: 0, shared_memory: 0 }
    }

    #[test]
    fn another_architecture_is_a_reason_and_names_the_device() {
        assert_eq!(named("NVIDIA H200", (9, 0)).require_hopper(), Ok(()));
        for (name, capability) in [("NVIDIA B200", (10, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0))] {
            let reason = named(name, capability).require_hopper().unwrap_err().to_string();
            assert!(reason.contains(name) && reason.contains("9.0"), "{reason}");
        }
    }

    #[test]
    fn a_machine_without_a_driver_gets_a_reason_and_no_panic() {
        match devices() {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(absence) => assert!(!absence.to_string().is_empty()),
        }
    }
}
