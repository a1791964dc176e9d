//! Tensor maps: how TMA finds a box of a bf16 tensor in device memory.

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{self, CUtensorMap};

use half::bf16;

use crate::error::Error;

use super::buffer::Buffer;
use super::probe::name_of;

/// A map for the box copies of TMA: bf16, swizzled over one line of the box, zeros beyond the edges,
/// 256-byte promotion in L2. 128 bytes, aligned to 128, passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct TensorMap(CUtensorMap);

// SAFETY: plain bytes that a kernel takes by value as a `__grid_constant__` parameter.
unsafe impl DeviceRepr for TensorMap {}

/// Bytes of an element.
const ELEMENT: u64 = size_of::<bf16>() as u64;

impl TensorMap {
    /// A map that no one reads.
    pub fn unused() -> Self {
        Self(CUtensorMap { opaque: [0; 16] })
    }

    /// Maps a row-major tensor: `sizes` and `box_sizes` from the contiguous dimension outwards. A
    /// tensor without elements is mapped as if each size of 0 were 1; no kernel reads it.
    ///
    /// # Errors
    /// A tensor larger than its buffer, a contiguous size that is no multiple of 8 elements (TMA's
    /// strides are multiples of 16 bytes), a box beyond 256 a side, or a driver that refuses.
    pub fn encode<const RANK: usize>(
        tensor: &Buffer<bf16>,
        sizes: [usize; RANK],
        box_sizes: [u32; RANK],
    ) -> crate::Result<Self> {
        let refused =
            |reason: String| Error::internal(format!("tensor map of `{}` {sizes:?}: {reason}", tensor.name()));
        let elements = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if elements.is_none_or(|elements| elements > tensor.len()) {
            return Err(refused(format!("the buffer holds only {} elements", tensor.len())));
        }
        let mapped = sizes.map(|size| size.max(1));
        if !mapped[0].is_multiple_of(8) || mapped.iter().any(|&size| size > u32::MAX as usize) {
            return Err(refused("every size must lie in 1..2³², and the contiguous one be a multiple of 8".into()));
        }
        let swizzle = match u64::from(box_sizes[0]) * ELEMENT {
            128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => return Err(refused(format!("a line of the box {box_sizes:?} is neither 64 nor 32 elements"))),
        };
        if box_sizes.iter().any(|&size| size == 0 || size > 256) {
            return Err(refused(format!("a side of the box {box_sizes:?} is not in 1..=256")));
        }
        let dims = mapped.map(|size| size as u64);
        let mut strides = [0; RANK];
        let mut stride = ELEMENT;
        for (place, &size) in strides.iter_mut().zip(&dims) {
            stride *= size;
            *place = stride;
        }
        if strides[..RANK - 1].iter().any(|&stride| stride >= 1 << 40) {
            return Err(refused("TMA's strides end at 2⁴⁰ bytes".into()));
        }
        let steps = [1u32; RANK];
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: the map is valid for a write and aligned to 128; the arrays have RANK entries (the
        // strides RANK − 1 of them); the address is 16-byte aligned, as buffers are. The call only
        // encodes.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                RANK as u32,
                tensor.address() as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                box_sizes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(|error| refused(name_of(error)))?;
        Ok(Self(map))
    }
}
