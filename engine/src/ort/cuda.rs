//! What ONNX Runtime needs of a CUDA GPU.
#![allow(unsafe_code, reason = "ONNX Runtime reads and writes a device's memory by address")]

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;

use millrace_device::Error as DeviceError;
use millrace_device::cuda::{CudaGpu, CudaRegion, CudaRegionPin, CudaStream, GpuBytes};

use super::memory::{DeviceAddress, OrtDevice, Provider};

// SAFETY: a region keeps its reservation of addresses for life. Its memory stays mapped until all work has
// finished that was queued to the stream of a pin while the pin lived.
unsafe impl OrtDevice for CudaGpu {
    type Pin = CudaRegionPin;
    /// Launches on a CUDA GPU are not counted, so the engine keeps nothing.
    type Launch = ();

    fn provider(&self) -> Provider {
        Provider::Cuda { device_id: self.ordinal() }
    }

    fn check_alive(&self) -> Result<(), DeviceError> {
        self.enter()
    }

    fn region_bytes(region: &CudaRegion) -> u64 {
        region.bytes()
    }

    fn address(region: &CudaRegion) -> DeviceAddress {
        DeviceAddress(region.address())
    }

    fn pin(
        stream: &mut CudaStream,
        region: &CudaRegion,
        bytes: &[Range<u64>],
    ) -> Result<CudaRegionPin, DeviceError> {
        stream.pin(region, bytes)
    }

    fn begin_launch(stream: &mut CudaStream) -> Result<(), DeviceError> {
        stream.begin_launch()
    }

    fn raw_stream(stream: &CudaStream) -> Option<NonNull<c_void>> {
        NonNull::new(stream.address() as *mut c_void)
    }

    unsafe fn write(stream: &mut CudaStream, to: DeviceAddress, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: the caller keeps the value until the stream's work has finished.
        unsafe { stream.write(to.0, bytes) }
    }

    unsafe fn copy(
        stream: &mut CudaStream,
        to: DeviceAddress,
        from: DeviceAddress,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: as above, for both ranges.
        unsafe { stream.copy_within(to.0, from.0, bytes) }
    }

    unsafe fn read(stream: &mut CudaStream, from: DeviceAddress, to: &mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: the bytes belong to a value, which the caller keeps.
        unsafe { stream.read(from.0, to) }
    }

    unsafe fn lend<'a>(from: DeviceAddress, bytes: u64) -> GpuBytes<'a> {
        // SAFETY: the bytes belong to a value that lives for 'a, and whose run was awaited before.
        unsafe { GpuBytes::new(from.0, bytes) }
    }
}
