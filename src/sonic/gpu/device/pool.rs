//! A device's own memory pool: it counts what this crate holds, and nothing else.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdeviceptr, CUmemPool_attribute};

/// Memory of one device, handed out in stream order.
pub(super) struct Pool(sys::CUmemoryPool);

// SAFETY: a handle; the driver allows its use from any thread.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool of the device `ordinal`. What is given back stays with the pool and is handed out again
    /// without a call to the system.
    ///
    /// # Errors
    /// The driver has no memory pools.
    pub(super) fn new(ordinal: usize) -> Result<Self, DriverError> {
        // SAFETY: a C struct of numbers, enums with a variant 0, and a pointer, for all of which zero
        // is a value; the driver asks for zeros in what is not set.
        let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = ordinal as i32;
        // SAFETY: the properties are complete.
        let pool = Self(unsafe { result::mem_pool::create(&properties) }?);
        let mut keep = u64::MAX;
        // SAFETY: the pool is alive; this attribute is a u64.
        unsafe {
            let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            result::mem_pool::set_attribute(pool.0, attribute, (&raw mut keep).cast())
        }?;
        Ok(pool)
    }

    /// Memory that is valid on `stream`, behind the work queued so far.
    ///
    /// # Safety
    /// The stream is alive and of the pool's device.
    pub(super) unsafe fn allocate(&self, bytes: usize, stream: sys::CUstream) -> Result<CUdeviceptr, DriverError> {
        // SAFETY: the pool is alive; the stream is the caller's promise.
        unsafe { result::mem_pool::alloc_async(self.0, bytes, stream) }
    }

    /// Bytes handed out and not given back.
    pub(super) fn in_use(&self) -> Result<usize, DriverError> {
        self.attribute(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    /// The most bytes that were handed out at a time since the last [`Pool::reset_peak`].
    pub(super) fn peak(&self) -> Result<usize, DriverError> {
        self.attribute(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    }

    pub(super) fn reset_peak(&self) -> Result<(), DriverError> {
        let mut zero = 0u64;
        // SAFETY: the pool is alive; this attribute is a u64, and zero resets it.
        unsafe {
            let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
            result::mem_pool::set_attribute(self.0, attribute, (&raw mut zero).cast())
        }
    }

    fn attribute(&self, attribute: CUmemPool_attribute) -> Result<usize, DriverError> {
        let mut value = 0u64;
        // SAFETY: the pool is alive; the attributes asked for are u64.
        unsafe { result::mem_pool::get_attribute(self.0, attribute, (&raw mut value).cast()) }?;
        Ok(value as usize)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; allocations that are still out keep it alive inside
        // the driver.
        let _ = unsafe { result::mem_pool::destroy(self.0) };
    }
}
