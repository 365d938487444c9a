//! The calls of a program, in the forms that the tests need.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use cudarc::driver::sys;

pub(crate) const BLOCK: usize = 2 << 20;

/// Calls the driver, and returns the number of the result code.
macro_rules! cu {
    ($name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the tests pass addresses that live during the call, and wrong handles only where the
        // double checks them.
        unsafe { cudarc::driver::sys::$name($($arg),*) as u32 }
    };
}

/// Calls the driver, and checks that the call succeeds.
macro_rules! ok {
    ($name:ident($($arg:expr),* $(,)?)) => {
        assert_eq!(cu!($name($($arg),*)), 0, stringify!($name))
    };
}
pub(crate) use {cu, ok};

/// Starts the driver, and enters the primary context of the first device.
pub(crate) fn enter() -> sys::CUcontext {
    ok!(cuInit(0));
    let mut context = null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok!(cuCtxSetCurrent(context));
    context
}

fn location(id: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

pub(crate) const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

pub(crate) fn properties(kind: sys::CUmemAllocationHandleType) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: kind,
        location: location(0),
        win32HandleMetaData: null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

pub(crate) fn create(blocks: usize) -> u64 {
    let mut handle = 0;
    ok!(cuMemCreate(
        &raw mut handle,
        blocks * BLOCK,
        &raw const *Box::leak(Box::new(properties(DESCRIPTOR))),
        0
    ));
    handle
}

pub(crate) fn reserve(blocks: usize) -> u64 {
    let mut at = 0;
    ok!(cuMemAddressReserve(&raw mut at, blocks * BLOCK, 0, 0, 0));
    at
}

pub(crate) fn open(at: u64, blocks: usize) -> u32 {
    let access = sys::CUmemAccessDesc {
        location: location(0),
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    cu!(cuMemSetAccess(at, blocks * BLOCK, &raw const access, 1))
}

/// Maps a new handle for each block at new addresses, with access. The handles are released: the
/// mappings keep the memory.
pub(crate) fn mapped(blocks: usize) -> u64 {
    let at = reserve(blocks);
    for block in 0..blocks {
        let handle = create(1);
        ok!(cuMemMap(at + (block * BLOCK) as u64, BLOCK, 0, handle, 0));
        ok!(cuMemRelease(handle));
    }
    assert_eq!(open(at, blocks), 0);
    at
}

pub(crate) fn stream() -> sys::CUstream {
    let mut stream = null_mut();
    ok!(cuStreamCreateWithPriority(&raw mut stream, 1, 0));
    stream
}

pub(crate) fn event() -> sys::CUevent {
    let mut event = null_mut();
    ok!(cuEventCreate(&raw mut event, 0));
    event
}

/// Pinned host memory.
pub(crate) fn pinned(bytes: usize) -> &'static mut [u8] {
    let mut at = null_mut();
    ok!(cuMemHostAlloc(&raw mut at, bytes, 1));
    // SAFETY: the driver allocated this many bytes, which the tests do not free while they use them.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), bytes) }
}

/// A stream that stands still until [`Gate::open`].
pub(crate) struct Gate {
    flag: &'static mut [u8],
}

impl Gate {
    pub(crate) fn close(stream: sys::CUstream) -> Self {
        let flag = pinned(4);
        flag.fill(0);
        ok!(cuStreamWaitValue32_v2(stream, flag.as_ptr().expose_provenance() as u64, 1, 0));
        Self { flag }
    }

    pub(crate) fn open(&mut self) {
        // SAFETY: the flag is aligned memory that lives as long as the process.
        let flag = unsafe { std::sync::atomic::AtomicU32::from_ptr(self.flag.as_mut_ptr().cast()) };
        flag.store(1, std::sync::atomic::Ordering::SeqCst);
    }

    pub(crate) fn free(self) {
        ok!(cuMemFreeHost(self.flag.as_mut_ptr().cast()));
    }
}

/// Reads memory of the device.
pub(crate) fn bytes(at: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    ok!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), at, count));
    bytes
}

/// Maps a memfd, and returns the address.
pub(crate) fn map_memfd(flags: rustix::mm::MapFlags, rights: rustix::mm::ProtFlags) -> *mut c_void {
    let file = rustix::fs::memfd_create("host", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8192).unwrap();
    // SAFETY: the system chooses free addresses.
    unsafe { rustix::mm::mmap(null_mut(), 8192, rights, flags, &file, 0).unwrap() }
}

/// Returns a module with the entries of the helper kernels.
pub(crate) fn module() -> sys::CUmodule {
    let text = c"
        .version 7.0 // as the helper kernels
        .target sm_75
        .visible .entry millrace_xor(.param .u64 at, .param .u64 bytes, .param .u32 mask) { ret; }
        .visible .entry millrace_pattern(.param .u64 at, .param .u64 bytes, .param .u64 seed) { ret; }
        .visible .entry millrace_check(.param .u64 at, .param .u64 bytes, .param .u64 seed, .param .u64 out) { ret; }
        .visible .entry millrace_hash(.param .u64 at, .param .u64 chunk, .param .u64 out) { ret; }
        .visible .entry millrace_spin(.param .u64 ns) { ret; }
        .visible .entry millrace_fma(.param .u64 out, .param .u32 rounds) { ret; }
        .visible .entry millrace_touch(.param .u64 at, .param .u64 bytes, .param .u32 rounds, .param .u64 out) { ret; }
        .visible .entry millrace_smid(.param .u64 out, .param .u64 ns) { ret; }
        .visible .entry millrace_flag(.param .u64 flag, .param .u32 value) { ret; }
        .visible .entry millrace_await(.param .u64 flag, .param .u32 value, .param .u64 ns) { ret; }
        .visible .entry another(.param .u64 at) { ret; }";
    let mut module = null_mut();
    ok!(cuModuleLoadData(&raw mut module, text.as_ptr().cast()));
    module
}

/// Queues a kernel of a module.
pub(crate) fn launch(
    module: sys::CUmodule,
    name: &std::ffi::CStr,
    blocks: u32,
    threads: u32,
    stream: sys::CUstream,
    arguments: &[u64],
) {
    let mut function = null_mut();
    ok!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()));
    let mut addresses: Vec<*mut c_void> =
        arguments.iter().map(|argument| std::ptr::from_ref(argument).cast_mut().cast()).collect();
    let none: *mut *mut c_void = null::<*mut c_void>().cast_mut();
    ok!(cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, addresses.as_mut_ptr(), none));
}
