//! What ONNX Runtime needs of a device: addresses, pins, a stream, and copies of values.
#![allow(unsafe_code, reason = "ONNX Runtime reads and writes a device's memory by address")]

use std::borrow::Cow;
use std::ffi::c_void;
use std::fmt::Debug;
use std::ops::Range;
use std::ptr::NonNull;

use millrace_device::emulated::{EmulatedGpu, EmulatedLaunch, EmulatedRegion, EmulatedStream, RegionPin};
use millrace_device::{Device, Error as DeviceError};
use ort::ep::CUDA;

/// The execution provider by which ONNX Runtime computes on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// The CPU provider, for a device with memory at addresses of this process. Launches run synchronously on
    /// the caller's thread.
    Cpu,
    /// The CUDA provider. Launches are enqueued to a stream of the device.
    Cuda {
        /// CUDA's number of the device in this process.
        device_id: i32,
    },
}

/// Address of a byte in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// Returns the address `bytes` further on.
    #[must_use]
    pub fn after(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    /// Returns the address as a pointer, which only the device's provider may follow.
    pub(super) fn pointer(self) -> *mut c_void {
        self.0 as usize as *mut c_void
    }
}

/// A device with memory that ONNX Runtime reads and writes.
///
/// Work that a method enqueues runs in the order of its stream, and may still be running when the method
/// returns, unless the method says otherwise.
///
/// # Safety
/// [`address`](Self::address) must be the same for the whole life of a region, and the addresses must be
/// valid for the provider while bytes of the region are pinned. Until all work is done that was enqueued to
/// the stream of [`pin`](Self::pin) while the pin lived, pinned bytes are neither unmapped nor written.
pub unsafe trait OrtDevice: Device {
    /// Keeps bytes of a region as they are while a launch or a value reads them. A pin keeps the region
    /// alive.
    type Pin: Debug + Send + Sync + 'static;

    /// The SMs of a launch. The engine keeps the value until the launch's calls have returned.
    type Launch: Debug;

    /// Returns the provider of this device.
    fn provider(&self) -> Provider;

    /// Fails if the device is lost.
    ///
    /// # Errors
    /// [`DeviceError::Lost`], [`DeviceError::ContextLost`].
    fn check_alive(&self) -> Result<(), DeviceError>;

    /// Returns the size of a region in bytes.
    fn region_bytes(region: &Self::Region) -> u64;

    /// Returns the address of a region's first byte.
    fn address(region: &Self::Region) -> DeviceAddress;

    /// Pins bytes of a region for work that is enqueued to `stream` from now on. A device whose copies may
    /// still be running lets the stream wait for the copies that load the bytes.
    ///
    /// # Errors
    /// [`DeviceError::NotResident`] if no copy of some byte was issued, or if the device cannot wait for the
    /// copy; [`DeviceError::BadExtent`].
    fn pin(
        stream: &mut Self::Stream,
        region: &Self::Region,
        bytes: &[Range<u64>],
    ) -> Result<Self::Pin, DeviceError>;

    /// Fails if a launch may not begin in this stream, because the device is lost or a fault was injected.
    /// With [`Provider::Cpu`], waits for the stream's earlier work.
    ///
    /// # Errors
    /// [`DeviceError::Lost`], [`DeviceError::OutOfMemory`]; the errors of the earlier work.
    fn begin_launch(stream: &mut Self::Stream) -> Result<Self::Launch, DeviceError>;

    /// Returns the CUstream of a stream, and `None` with [`Provider::Cpu`].
    fn raw_stream(stream: &Self::Stream) -> Option<NonNull<c_void>>;

    /// Copies `bytes` from host memory to a value of ONNX Runtime. The bytes may be changed as soon as the
    /// method returns.
    ///
    /// # Safety
    /// The bytes at `to` belong to the caller.
    ///
    /// # Errors
    /// [`DeviceError::CopyFailed`], [`DeviceError::Lost`].
    unsafe fn write(stream: &mut Self::Stream, to: DeviceAddress, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes within the device.
    ///
    /// # Safety
    /// The `bytes` bytes at `to` belong to the caller. The bytes at `from` are pinned or belong
    /// to a value, for as long as work of the stream may read them. The two ranges do not overlap.
    ///
    /// # Errors
    /// As [`Self::write`].
    unsafe fn copy(
        stream: &mut Self::Stream,
        to: DeviceAddress,
        from: DeviceAddress,
        bytes: u64,
    ) -> Result<(), DeviceError>;

    /// Copies bytes of a value to host memory, after all earlier work of the stream, and waits for the copy.
    ///
    /// # Safety
    /// The bytes at `from` belong to a value.
    ///
    /// # Errors
    /// As [`Self::write`]; the errors of the earlier work.
    unsafe fn read(stream: &mut Self::Stream, from: DeviceAddress, to: &mut [u8]) -> Result<(), DeviceError>;

    /// Lends bytes of a value to the device's copies.
    ///
    /// # Safety
    /// The bytes belong to a value that lives for `'a`.
    unsafe fn lend<'a>(from: DeviceAddress, bytes: u64) -> Self::Bytes<'a>;
}

/// Lets CUDA's provider enqueue all work to a stream of the device.
pub(super) fn cuda_provider(provider: CUDA, stream: NonNull<c_void>) -> CUDA {
    // SAFETY: the stream is the compute stream of a `SessionContext`, which every kernel keeps alive and
    // which drops its own session first.
    unsafe { provider.with_compute_stream(stream.as_ptr().cast()) }
}

// SAFETY: a region keeps its reservation of addresses for life. A region pin has the rules of
// `millrace_device::emulated::region`, and launches run synchronously, so no work outlives its pin.
unsafe impl OrtDevice for EmulatedGpu {
    type Pin = RegionPin;
    type Launch = EmulatedLaunch;

    fn provider(&self) -> Provider {
        Provider::Cpu
    }

    fn check_alive(&self) -> Result<(), DeviceError> {
        self.alive()
    }

    fn region_bytes(region: &EmulatedRegion) -> u64 {
        region.bytes()
    }

    fn address(region: &EmulatedRegion) -> DeviceAddress {
        DeviceAddress(region.address() as u64)
    }

    fn pin(
        _stream: &mut EmulatedStream,
        region: &EmulatedRegion,
        bytes: &[Range<u64>],
    ) -> Result<RegionPin, DeviceError> {
        region.pin(bytes)
    }

    fn begin_launch(stream: &mut EmulatedStream) -> Result<EmulatedLaunch, DeviceError> {
        stream.begin_launch()
    }

    fn raw_stream(_stream: &EmulatedStream) -> Option<NonNull<c_void>> {
        None
    }

    unsafe fn write(
        _stream: &mut EmulatedStream,
        to: DeviceAddress,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        // SAFETY: the bytes at `to` belong to the caller, and so do not overlap a slice of other memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.pointer().cast(), bytes.len()) };
        Ok(())
    }

    unsafe fn copy(
        _stream: &mut EmulatedStream,
        to: DeviceAddress,
        from: DeviceAddress,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that both ranges are valid and do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping::<u8>(from.pointer().cast(), to.pointer().cast(), bytes as usize);
        };
        Ok(())
    }

    unsafe fn read(
        _stream: &mut EmulatedStream,
        from: DeviceAddress,
        to: &mut [u8],
    ) -> Result<(), DeviceError> {
        // SAFETY: the bytes belong to a value, and launches that write values have finished.
        unsafe { std::ptr::copy_nonoverlapping(from.pointer().cast(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn lend<'a>(from: DeviceAddress, bytes: u64) -> Cow<'a, [u8]> {
        if bytes == 0 {
            // ONNX Runtime may give a value without elements no address.
            return Cow::Borrowed(&[]);
        }
        // SAFETY: the bytes belong to a value that lives for 'a, and no code writes to a value.
        Cow::Borrowed(unsafe { std::slice::from_raw_parts(from.pointer().cast(), bytes as usize) })
    }
}
