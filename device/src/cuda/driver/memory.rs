//! Physical memory and address ranges.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use cudarc::driver::sys;

use super::{Gpu, check, released, report};
use crate::error::DriverError;

const POSIX_DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Physical memory of a GPU, which another process can import. The memory stays until the handle and
/// all its mappings are gone.
#[derive(Debug)]
pub(crate) struct MemoryHandle {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: u64,
}

/// Returns the properties of memory that this device makes.
fn properties(gpu: Gpu) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX_DESCRIPTOR,
        location: location(gpu),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(gpu: Gpu) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.device }
}

/// Returns the driver's unit of physical memory, in bytes.
pub(crate) fn granularity(gpu: Gpu) -> Result<u64, DriverError> {
    let mut bytes = 0;
    let properties = properties(gpu);
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the driver reads the properties and writes an integer.
    let result = unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, option) };
    check("cuMemGetAllocationGranularity", result)?;
    Ok(bytes as u64)
}

impl MemoryHandle {
    /// Takes physical memory from the driver. `bytes` is a multiple of the [`granularity`].
    pub(crate) fn create(gpu: Gpu, bytes: u64) -> Result<Self, DriverError> {
        let mut handle = 0;
        let properties = properties(gpu);
        // SAFETY: the driver reads the properties and writes a handle, which is released once, on drop.
        let result = unsafe { sys::cuMemCreate(&raw mut handle, bytes as usize, &raw const properties, 0) };
        check("cuMemCreate", result)?;
        Ok(Self { handle, bytes })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns a descriptor, by which another process can import the memory.
    pub(crate) fn export(&self) -> Result<OwnedFd, DriverError> {
        let mut descriptor: RawFd = -1;
        // SAFETY: for this type of handle, the driver writes a descriptor.
        let result = unsafe {
            sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), self.handle, POSIX_DESCRIPTOR, 0)
        };
        check("cuMemExportToShareableHandle", result)?;
        // SAFETY: the driver opened the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Imports memory of `bytes` bytes that another process exported.
    pub(crate) fn import(descriptor: BorrowedFd<'_>, bytes: u64) -> Result<Self, DriverError> {
        let mut handle = 0;
        // The driver takes the descriptor's number in the place of a pointer.
        let number = descriptor.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: the descriptor is open, and the driver writes a handle, which is released once, on drop.
        let result =
            unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, number, POSIX_DESCRIPTOR) };
        check("cuMemImportFromShareableHandle", result)?;
        Ok(Self { handle, bytes })
    }
}

impl Drop for MemoryHandle {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own. Mappings of the memory keep the memory.
        released("cuMemRelease", unsafe { sys::cuMemRelease(self.handle) });
    }
}

/// Reserved addresses of the GPU and of this process. Dropping the value unmaps what is mapped, and
/// frees the addresses.
#[derive(Debug)]
pub(crate) struct AddressRange {
    base: u64,
    bytes: u64,
    /// Start and length of each mapping, in ascending order.
    mapped: Vec<(u64, u64)>,
}

impl AddressRange {
    /// Reserves addresses, without memory behind them. The driver takes the addresses of the hint if
    /// they are free, and others if they are not; 0 is no hint.
    pub(crate) fn reserve(bytes: u64, hint: u64) -> Result<Self, DriverError> {
        let mut base = 0;
        // SAFETY: the driver writes an address. The range is freed once, on drop.
        let result = unsafe { sys::cuMemAddressReserve(&raw mut base, bytes as usize, 0, hint, 0) };
        check("cuMemAddressReserve", result)?;
        Ok(Self { base, bytes, mapped: Vec::new() })
    }

    /// Returns the first address.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maps all memory of a handle at `offset`, without access.
    pub(crate) fn map(&mut self, offset: u64, handle: &MemoryHandle) -> Result<(), DriverError> {
        assert!(offset.checked_add(handle.bytes).is_some_and(|end| end <= self.bytes), "outside the range");
        // SAFETY: the addresses are this value's own, and the driver refuses addresses that are mapped.
        let result = unsafe { sys::cuMemMap(self.base + offset, handle.bytes as usize, 0, handle.handle, 0) };
        check("cuMemMap", result)?;
        let at = self.mapped.partition_point(|&(start, _)| start < offset);
        self.mapped.insert(at, (offset, handle.bytes));
        Ok(())
    }

    /// Opens mapped bytes for reading and writing by a GPU.
    pub(crate) fn open(&self, offset: u64, bytes: u64, gpu: Gpu) -> Result<(), DriverError> {
        let access = sys::CUmemAccessDesc {
            location: location(gpu),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the driver reads one description, and refuses addresses that are not mapped.
        let result = unsafe { sys::cuMemSetAccess(self.base + offset, bytes as usize, &raw const access, 1) };
        check("cuMemSetAccess", result)
    }

    /// Unmaps whole mappings, from `offset` on.
    ///
    /// # Safety
    /// No queued or running work uses these bytes.
    pub(crate) unsafe fn unmap(&mut self, offset: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise; the driver refuses a part of a mapping.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.base + offset, bytes as usize) })?;
        self.mapped.retain(|&(start, _)| !(offset..offset + bytes).contains(&start));
        Ok(())
    }

    /// Unmaps everything.
    ///
    /// # Safety
    /// No queued or running work uses the range.
    pub(crate) unsafe fn unmap_all(&mut self) -> Result<(), DriverError> {
        let Some(&(first, _)) = self.mapped.first() else { return Ok(()) };
        let end = self.mapped.last().map_or(first, |&(offset, bytes)| offset + bytes);
        let whole = self.mapped.iter().map(|&(_, bytes)| bytes).sum::<u64>() == end - first;
        if whole {
            // SAFETY: the caller's promise.
            return unsafe { self.unmap(first, end - first) };
        }
        for (offset, bytes) in self.mapped.clone() {
            // SAFETY: the caller's promise.
            unsafe { self.unmap(offset, bytes)? };
        }
        Ok(())
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: the owner drops the range after the work that used it.
        if let Err(error) = unsafe { self.unmap_all() } {
            report(&error);
        }
        // SAFETY: the range is this value's own, and nothing is mapped there.
        released("cuMemAddressFree", unsafe { sys::cuMemAddressFree(self.base, self.bytes as usize) });
    }
}
