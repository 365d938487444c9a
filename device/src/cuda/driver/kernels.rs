//! The helper kernels of `kernels.ptx`.
#![allow(unsafe_code, reason = "launches kernels")]

use std::ffi::{CString, c_void};
use std::time::Duration;

use cudarc::driver::sys;

use super::{Context, RawStream, check, released};
use crate::error::DriverError;

/// The text of the kernels. The driver compiles it for the GPU.
const TEXT: &str = include_str!("../kernels.ptx");

/// Threads of a block.
const THREADS: u32 = 256;
/// Most blocks of a kernel that loops over its bytes: enough for all SMs of the GPUs of today.
const BLOCKS_MAX: u64 = 132 * 8;

/// The helper kernels, compiled for a GPU.
#[derive(Debug)]
pub(crate) struct Kernels {
    module: sys::CUmodule,
    xor: sys::CUfunction,
    pattern: sys::CUfunction,
    check: sys::CUfunction,
    hash: sys::CUfunction,
    spin: sys::CUfunction,
    fma: sys::CUfunction,
    touch: sys::CUfunction,
    smid: sys::CUfunction,
    flag: sys::CUfunction,
    await_flag: sys::CUfunction,
    _context: Context,
}

// SAFETY: the driver's modules and functions may be used from all threads.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

/// Blocks and threads of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
}

impl Grid {
    const ONE: Self = Self { blocks: 1, threads: 1 };

    /// Returns a grid for a kernel that loops over `items`.
    fn over(items: u64) -> Self {
        let blocks = items.div_ceil(u64::from(THREADS)).clamp(1, BLOCKS_MAX);
        Self { blocks: u32::try_from(blocks).unwrap_or(u32::MAX), threads: THREADS }
    }
}

impl Kernels {
    /// Compiles the kernels for the GPU of a context.
    pub(crate) fn load(context: &Context) -> Result<Self, DriverError> {
        context.enter()?;
        let text = CString::new(TEXT).expect("the text has no zero");
        let mut module = std::ptr::null_mut();
        // SAFETY: the driver reads a C string and writes a module, which is unloaded once, on drop.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast()) })?;
        let function = |name: &std::ffi::CStr| {
            let mut function = std::ptr::null_mut();
            // SAFETY: the module lives, and the driver writes a function.
            let result = unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
            check("cuModuleGetFunction", result).map(|()| function)
        };
        Ok(Self {
            module,
            xor: function(c"millrace_xor")?,
            pattern: function(c"millrace_pattern")?,
            check: function(c"millrace_check")?,
            hash: function(c"millrace_hash")?,
            spin: function(c"millrace_spin")?,
            fma: function(c"millrace_fma")?,
            touch: function(c"millrace_touch")?,
            smid: function(c"millrace_smid")?,
            flag: function(c"millrace_flag")?,
            await_flag: function(c"millrace_await")?,
            _context: context.clone(),
        })
    }

    /// Flips the bits of `mask` in each 32-bit word of a range.
    ///
    /// # Safety
    /// The range stays until the work has finished.
    pub(crate) unsafe fn xor(
        &self,
        stream: &RawStream,
        at: u64,
        bytes: u64,
        mask: u32,
    ) -> Result<(), DriverError> {
        let blocks = (bytes / 4).div_ceil(u64::from(THREADS)).max(1);
        let grid = Grid { blocks: u32::try_from(blocks).unwrap_or(u32::MAX), threads: THREADS };
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.xor, grid, stream, &mut [arg(&at), arg(&bytes), arg(&mask)]) }
    }

    /// Writes the words of a seed to a range.
    ///
    /// # Safety
    /// As [`Self::xor`].
    pub(crate) unsafe fn pattern(
        &self,
        stream: &RawStream,
        at: u64,
        bytes: u64,
        seed: u64,
    ) -> Result<(), DriverError> {
        let grid = Grid::over(bytes / 8);
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.pattern, grid, stream, &mut [arg(&at), arg(&bytes), arg(&seed)]) }
    }

    /// Adds the number of words that differ from those of a seed to the word at `out`.
    ///
    /// # Safety
    /// As [`Self::xor`].
    pub(crate) unsafe fn check(
        &self,
        stream: &RawStream,
        at: u64,
        bytes: u64,
        seed: u64,
        out: u64,
    ) -> Result<(), DriverError> {
        let grid = Grid::over(bytes / 8);
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.check, grid, stream, &mut [arg(&at), arg(&bytes), arg(&seed), arg(&out)]) }
    }

    /// Adds a hash of each chunk of a range to the words from `out` on.
    ///
    /// # Safety
    /// As [`Self::xor`].
    pub(crate) unsafe fn hash(
        &self,
        stream: &RawStream,
        at: u64,
        chunks: u32,
        chunk: u64,
        out: u64,
    ) -> Result<(), DriverError> {
        let grid = Grid { blocks: chunks, threads: 1024 };
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.hash, grid, stream, &mut [arg(&at), arg(&chunk), arg(&out)]) }
    }

    /// Keeps a single thread of the GPU busy for a time.
    pub(crate) fn spin(&self, stream: &RawStream, time: Duration) -> Result<(), DriverError> {
        let nanos = time.as_nanos() as u64;
        // SAFETY: the kernel uses no memory; the argument is the kernel's.
        unsafe { launch(self.spin, Grid::ONE, stream, &mut [arg(&nanos)]) }
    }

    /// Multiplies and adds, `rounds` times 32 operations in each thread, and writes a number for each
    /// thread from `out` on.
    ///
    /// # Safety
    /// As [`Self::xor`].
    pub(crate) unsafe fn fma(
        &self,
        stream: &RawStream,
        grid: Grid,
        rounds: u32,
        out: u64,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.fma, grid, stream, &mut [arg(&out), arg(&rounds)]) }
    }

    /// Reads a range `rounds` times.
    ///
    /// # Safety
    /// As [`Self::xor`].
    pub(crate) unsafe fn touch(
        &self,
        stream: &RawStream,
        at: u64,
        bytes: u64,
        rounds: u32,
        out: u64,
    ) -> Result<(), DriverError> {
        let grid = Grid { blocks: BLOCKS_MAX as u32, threads: THREADS };
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.touch, grid, stream, &mut [arg(&at), arg(&bytes), arg(&rounds), arg(&out)]) }
    }

    /// Writes the SM of each block from `out` on. Each block stays on its SM for a time.
    ///
    /// # Safety
    /// As [`Self::xor`].
    pub(crate) unsafe fn smid(
        &self,
        stream: &RawStream,
        grid: Grid,
        out: u64,
        time: Duration,
    ) -> Result<(), DriverError> {
        let nanos = time.as_nanos() as u64;
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.smid, grid, stream, &mut [arg(&out), arg(&nanos)]) }
    }

    /// Writes a value to host memory that the GPU reaches.
    ///
    /// # Safety
    /// As [`Self::xor`].
    pub(crate) unsafe fn flag(&self, stream: &RawStream, flag: u64, value: u32) -> Result<(), DriverError> {
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.flag, Grid::ONE, stream, &mut [arg(&flag), arg(&value)]) }
    }

    /// Waits on the GPU until host memory has a value, at most `most`.
    ///
    /// # Safety
    /// As [`Self::xor`].
    pub(crate) unsafe fn await_flag(
        &self,
        stream: &RawStream,
        flag: u64,
        value: u32,
        most: Duration,
    ) -> Result<(), DriverError> {
        let nanos = most.as_nanos() as u64;
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch(self.await_flag, Grid::ONE, stream, &mut [arg(&flag), arg(&value), arg(&nanos)]) }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: the module is this value's own, and its owner drops it after its launches.
        released("cuModuleUnload", unsafe { sys::cuModuleUnload(self.module) });
    }
}

/// Returns the address of an argument.
fn arg<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Queues a kernel.
///
/// # Safety
/// The arguments are those of the function, and the memory that they name stays until the work has
/// finished.
unsafe fn launch(
    function: sys::CUfunction,
    Grid { blocks, threads }: Grid,
    stream: &RawStream,
    args: &mut [*mut c_void],
) -> Result<(), DriverError> {
    stream.context().enter()?;
    let none = std::ptr::null_mut();
    // SAFETY: the caller's promise. The driver copies the arguments during the call.
    let result = unsafe {
        sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream.raw(), args.as_mut_ptr(), none)
    };
    check("cuLaunchKernel", result)
}
