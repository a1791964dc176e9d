//! Device memory of one tensor, with red zones on both sides that no kernel may touch.

use std::hash::{DefaultHasher, Hasher};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{DeviceRepr, result};
use half::bf16;

use crate::error::Error;

use super::context::Device;

/// What is laid around and into buffers, so that a kernel which strays is seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guards {
    /// Bytes of the red zone on each side, a multiple of 256. Read as bf16 or f32, a red zone holds
    /// NaN only: what is read from it shows in the results.
    pub red_zone: usize,
    /// The byte that results are filled with before a kernel writes them.
    pub poison: Option<u8>,
}

impl Guards {
    /// No red zones and no poison: memory use is the tensors' alone.
    pub const NONE: Self = Self { red_zone: 0, poison: None };
    /// Red zones, and every result NaN before it is written.
    pub const NAN: Self = Self { red_zone: 16384, poison: Some(0xff) };
    /// Red zones, and every result a finite number (0.747) before it is written: 0·NaN would show
    /// with the other poison, a stale finite number only with this one.
    pub const FINITE: Self = Self { red_zone: 16384, poison: Some(0x3f) };
}

/// What device tensors are made of: plain numbers for which every pattern of bits is a value.
pub trait Scalar: DeviceRepr + Copy + Default + private::Sealed {}

mod private {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for f32 {}
    impl Sealed for u32 {}
    impl Sealed for f64 {}
    impl Sealed for u64 {}
}

impl Scalar for bf16 {}
impl Scalar for f32 {}
impl Scalar for u32 {}
impl Scalar for f64 {}
impl Scalar for u64 {}

/// The device memory of one tensor.
pub struct Buffer<T: Scalar> {
    device: Arc<Device>,
    name: &'static str,
    allocation: CUdeviceptr,
    len: usize,
    red_zone: usize,
    /// Of an input: what it held when it was uploaded.
    fingerprint: Option<u64>,
    elements: PhantomData<T>,
}

impl<T: Scalar> Buffer<T> {
    /// Memory for a result of `len` elements.
    ///
    /// # Errors
    /// Not enough device memory.
    pub fn output(device: &Arc<Device>, name: &'static str, len: usize, guards: Guards) -> crate::Result<Self> {
        let buffer = Self::allocate(device, name, len, guards.red_zone)?;
        if let Some(poison) = guards.poison {
            let _turn = device.idle()?;
            // SAFETY: the payload was allocated on this stream just now.
            unsafe {
                result::memset_d8_async(buffer.address(), poison, buffer.payload_bytes(), device.stream().cu_stream())
            }
            .map_err(|error| buffer.failed(error))?;
        }
        Ok(buffer)
    }

    /// Memory for `values`, and the values in it.
    ///
    /// # Errors
    /// Not enough device memory.
    pub fn input(device: &Arc<Device>, name: &'static str, values: &[T], guards: Guards) -> crate::Result<Self> {
        let mut buffer = Self::allocate(device, name, values.len(), guards.red_zone)?;
        buffer.copy_in(buffer.address(), values)?;
        buffer.fingerprint = (guards.red_zone > 0).then(|| fingerprint(values));
        Ok(buffer)
    }

    fn allocate(device: &Arc<Device>, name: &'static str, len: usize, red_zone: usize) -> crate::Result<Self> {
        let too_large = || Error::device(format!("`{name}` of {len} elements has more bytes than an address can tell"));
        let payload = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_next_multiple_of(PAYLOAD_STEP));
        let bytes =
            payload.and_then(|payload| payload.max(PAYLOAD_STEP).checked_add(2 * red_zone)).ok_or_else(too_large)?;
        let allocation = {
            let _turn = device.idle()?;
            // SAFETY: a context is current and the stream belongs to it.
            unsafe { device.pool().allocate(bytes, device.stream().cu_stream()) }
                .map_err(|error| device.failed(&format!("`{name}` of {len} elements, {bytes} bytes"), error))?
        };
        let buffer = Self {
            device: Arc::clone(device),
            name,
            allocation,
            len,
            red_zone,
            fingerprint: None,
            elements: PhantomData,
        };
        if red_zone > 0 {
            let pattern = red_zone_pattern(red_zone + buffer.slack());
            buffer.copy_in(allocation, &pattern[..red_zone])?;
            buffer.copy_in(buffer.address() + buffer.payload_bytes() as u64, &pattern)?;
        }
        Ok(buffer)
    }

    /// The tensor's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the elements; red zones are not counted.
    pub fn payload_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device address of the first element, aligned to 256 bytes. Also valid, to nothing that
    /// may be read, for a buffer without elements.
    pub fn address(&self) -> CUdeviceptr {
        self.allocation + self.red_zone as u64
    }

    /// Elements that are allocated at the address: those of an empty buffer's allocation may be
    /// mapped, and are never read.
    pub(super) fn capacity(&self) -> usize {
        (self.payload_bytes().next_multiple_of(PAYLOAD_STEP).max(PAYLOAD_STEP)) / size_of::<T>()
    }

    /// Waits for all work and copies the elements to the host.
    ///
    /// # Errors
    /// As [`Device::wait`].
    pub fn download(&self) -> crate::Result<Vec<T>> {
        self.device.wait()?;
        let mut values = vec![T::default(); self.len];
        self.copy_out(self.address(), &mut values)?;
        Ok(values)
    }

    /// Waits for all work and copies the elements of `range` to the host.
    ///
    /// # Errors
    /// As [`Device::wait`]; or a range that ends beyond the last element.
    pub fn download_range(&self, range: std::ops::Range<usize>) -> crate::Result<Vec<T>> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::internal(format!("`{}` has {} elements, not {range:?}", self.name, self.len)));
        }
        self.device.wait()?;
        let mut values = vec![T::default(); range.len()];
        self.copy_out(self.address() + (range.start * size_of::<T>()) as u64, &mut values)?;
        Ok(values)
    }

    /// Overwrites the elements.
    ///
    /// # Errors
    /// Another number of values, or a device that fails.
    pub fn upload(&mut self, values: &[T]) -> crate::Result<()> {
        if values.len() != self.len {
            return Err(Error::internal(format!("`{}` has {} elements, not {}", self.name, self.len, values.len())));
        }
        self.device.wait()?;
        self.copy_in(self.address(), values)?;
        self.fingerprint = self.fingerprint.map(|_| fingerprint(values));
        Ok(())
    }

    /// Queues filling every byte of the elements.
    ///
    /// # Errors
    /// A device that fails.
    pub(in crate::sonic::gpu) fn fill(&mut self, byte: u8) -> crate::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let _turn = self.device.turn()?;
        // SAFETY: the payload is allocated on this stream, and exclusively borrowed.
        unsafe { result::memset_d8_async(self.address(), byte, self.payload_bytes(), self.device.stream().cu_stream()) }
            .map_err(|error| self.failed(error))
    }

    /// Compares the red zones with what was laid there, byte by byte; without red zones there is
    /// nothing to compare.
    ///
    /// # Errors
    /// The first byte that a kernel overwrote, counted from the first element or behind the last.
    pub fn check_red_zones(&self) -> crate::Result<()> {
        if self.red_zone == 0 {
            return Ok(());
        }
        self.device.wait()?;
        let pattern = red_zone_pattern(self.red_zone + self.slack());
        let mut before = vec![0u8; self.red_zone];
        self.copy_out(self.allocation, &mut before)?;
        if let Some(at) = before.iter().zip(&pattern).rposition(|(found, laid)| found != laid) {
            let bytes = self.red_zone - at;
            return Err(Error::internal(format!("a kernel wrote {bytes} bytes before the start of `{}`", self.name)));
        }
        let mut behind = vec![0u8; pattern.len()];
        self.copy_out(self.address() + self.payload_bytes() as u64, &mut behind)?;
        if let Some(at) = behind.iter().zip(&pattern).position(|(found, laid)| found != laid) {
            return Err(Error::internal(format!("a kernel wrote {at} bytes behind the end of `{}`", self.name)));
        }
        Ok(())
    }

    /// Compares an input with what was uploaded; a result, or an input without red zones, has
    /// nothing to compare with.
    ///
    /// # Errors
    /// A kernel wrote into it.
    pub fn check_unchanged(&self) -> crate::Result<()> {
        match self.fingerprint {
            Some(laid) if fingerprint(&self.download()?) != laid => {
                Err(Error::internal(format!("a kernel wrote into its input `{}`", self.name)))
            }
            _ => Ok(()),
        }
    }

    /// [`Buffer::check_red_zones`] and [`Buffer::check_unchanged`].
    ///
    /// # Errors
    /// A kernel wrote into it or around it.
    pub fn check_untouched(&self) -> crate::Result<()> {
        self.check_red_zones()?;
        self.check_unchanged()
    }

    /// Bytes between the last element and the red zone proper, which belong to it.
    fn slack(&self) -> usize {
        self.capacity() * size_of::<T>() - self.payload_bytes()
    }

    fn copy_in<V: Copy>(&self, address: CUdeviceptr, values: &[V]) -> crate::Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let _turn = self.device.idle()?;
        // SAFETY: the range lies inside the allocation, on whose stream the copy is queued. From
        // pageable memory the driver takes a copy before it returns.
        unsafe { result::memcpy_htod_async(address, values, self.device.stream().cu_stream()) }
            .map_err(|error| self.failed(error))
    }

    fn copy_out<V: Copy>(&self, address: CUdeviceptr, values: &mut [V]) -> crate::Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        {
            let _turn = self.device.idle()?;
            // SAFETY: the range lies inside the allocation; V is a scalar, of which every pattern of
            // bits is a value; into pageable memory the call returns only when the copy is done.
            unsafe { result::memcpy_dtoh_async(values, address, self.device.stream().cu_stream()) }
                .map_err(|error| self.failed(error))?;
        }
        self.device.wait()
    }

    fn failed(&self, error: result::DriverError) -> Error {
        self.device.failed(&format!("copying `{}`", self.name), error)
    }
}

impl<T: Scalar> Drop for Buffer<T> {
    fn drop(&mut self) {
        // On a lost device, or in the middle of a recording (only after an error), the memory is left.
        let Ok(_turn) = self.device.idle() else { return };
        // SAFETY: allocated on this stream, given back once and behind all work queued so far.
        let _ = unsafe { result::free_async(self.allocation, self.device.stream().cu_stream()) };
    }
}

/// Allocations are rounded up to whole sectors; also the least that an empty tensor takes, so that
/// it has an address and a tensor map of one row.
const PAYLOAD_STEP: usize = 16;

/// Bytes that differ from place to place and are NaN as bf16 and as f32.
fn red_zone_pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| if at % 2 == 1 { 0x7f | ((at * 5) & 0x80) as u8 } else { 0x81 | (at * 37 / 2) as u8 }).collect()
}

fn fingerprint<T: Scalar>(values: &[T]) -> u64 {
    // SAFETY: scalars are plain numbers without padding, readable as bytes.
    let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_red_zone_reads_as_nan_in_both_types_and_varies() {
        let pattern = red_zone_pattern(4096);
        assert!(pattern.chunks_exact(2).all(|b| bf16::from_le_bytes([b[0], b[1]]).is_nan()));
        assert!(pattern.chunks_exact(4).all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_nan()));
        assert!(pattern.chunks_exact(2).any(|b| b != &pattern[..2]));
    }
}
