//! Each rule of the double, broken once in a process of its own.
#![allow(unsafe_code, reason = "calls the double as a program calls the driver")]
#![allow(clippy::unwrap_used)]

mod support;

use std::ffi::c_void;
use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::ptr::{null_mut, without_provenance_mut};

use cudarc::driver::sys;
use rustix::mm::{MapFlags, ProtFlags};

const BLOCK: usize = 2 << 20;

/// Calls the driver, and returns the number of the answer.
macro_rules! driver {
    ($call:ident($($argument:expr),*)) => {{
        // SAFETY: the addresses are those of this test's variables and memory, or break a rule that
        // the double answers before it uses them.
        let answer = unsafe { sys::$call($($argument),*) };
        answer as u32
    }};
}

/// Calls the driver, which must not refuse.
macro_rules! ok {
    ($call:ident($($argument:expr),*)) => {
        assert_eq!(driver!($call($($argument),*)), 0, stringify!($call))
    };
}

/// Opens the GPU and makes its context current.
fn open() {
    let mut context = null_mut();
    ok!(cuInit(0));
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok!(cuCtxSetCurrent(context));
}

fn stream() -> sys::CUstream {
    let mut stream = null_mut();
    ok!(cuStreamCreateWithPriority(&raw mut stream, 1, 0));
    stream
}

fn event() -> sys::CUevent {
    let mut event = null_mut();
    ok!(cuEventCreate(&raw mut event, 0));
    event
}

fn pinned(bytes: usize) -> *mut c_void {
    let mut at = null_mut();
    ok!(cuMemHostAlloc(&raw mut at, bytes, 0));
    at
}

fn reserve(blocks: usize) -> u64 {
    let mut at = 0;
    ok!(cuMemAddressReserve(&raw mut at, blocks * BLOCK, 0, 0, 0));
    at
}

fn location() -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 }
}

fn create(bytes: usize) -> (u32, u64) {
    let properties = sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: location(),
        win32HandleMetaData: null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    };
    let mut handle = 0;
    let answer = driver!(cuMemCreate(&raw mut handle, bytes, &raw const properties, 0));
    (answer, handle)
}

fn handle() -> u64 {
    let (answer, handle) = create(BLOCK);
    assert_eq!(answer, 0);
    handle
}

/// Returns a range of blocks that are mapped without access.
fn mapped(blocks: usize) -> u64 {
    let base = reserve(blocks);
    for at in 0..blocks {
        ok!(cuMemMap(base + (at * BLOCK) as u64, BLOCK, 0, handle(), 0));
    }
    base
}

fn set_access(at: u64, blocks: usize) -> u32 {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location: location(), flags };
    driver!(cuMemSetAccess(at, blocks * BLOCK, &raw const access, 1))
}

/// Returns a block that can be used.
fn usable() -> u64 {
    let at = mapped(1);
    assert_eq!(set_access(at, 1), 0);
    at
}

/// Puts a copy behind an event of another stream, so that the copy is queued for a long time. Returns the stream and
/// the addresses of the copy.
fn queued_copy() -> (sys::CUstream, u64, *mut c_void) {
    let gpu = usable();
    let host = pinned(BLOCK);
    let slow = stream();
    let gate = event();
    launch_spin(slow);
    ok!(cuEventRecord(gate, slow));
    let stream = stream();
    ok!(cuStreamWaitEvent(stream, gate, 0));
    ok!(cuMemcpyHtoDAsync_v2(gpu, host, BLOCK, stream));
    (stream, gpu, host)
}

const TEXT: &std::ffi::CStr = c".version 7.8 .target sm_80 .visible .entry millrace_spin(.param .u64 ns) {}
    .visible .entry millrace_other(.param .u64 ns) {} .visible .entry millrace_flag(.param .u64 flag) {}";

fn function(name: &std::ffi::CStr) -> (u32, sys::CUfunction) {
    let mut module = null_mut();
    ok!(cuModuleLoadData(&raw mut module, TEXT.as_ptr().cast()));
    let mut function = null_mut();
    let answer = driver!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()));
    (answer, function)
}

/// Keeps a stream busy for ten seconds.
fn launch_spin(stream: sys::CUstream) {
    let (answer, function) = function(c"millrace_spin");
    assert_eq!(answer, 0);
    let nanos = 10_000_000_000_u64;
    let mut arguments = [(&raw const nanos).cast_mut().cast::<c_void>()];
    ok!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut()));
}

/// Maps a memfd of a page.
fn page(flags: MapFlags, access: ProtFlags) -> *mut c_void {
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    // SAFETY: a new mapping at an address of the kernel's choice.
    unsafe { rustix::mm::mmap(null_mut(), 4096, access, flags, file.as_fd(), 0) }.unwrap()
}

fn register(at: *mut c_void, flags: u32) -> u32 {
    driver!(cuMemHostRegister_v2(at, 4096, flags))
}

/// Answer to a broken rule.
#[derive(Debug, Clone, Copy)]
enum Answer {
    Code(u32),
    /// The scenario breaks the rule, and the process ends at once.
    Abort,
}

struct Rule {
    name: &'static str,
    answer: Answer,
    /// Line that is printed, after `cuda double: `.
    line: &'static str,
    /// Breaks the rule, and returns the answer.
    break_it: fn() -> u32,
}

const fn refuses(code: u32, name: &'static str, line: &'static str, break_it: fn() -> u32) -> Rule {
    Rule { name, answer: Answer::Code(code), line, break_it }
}

const fn aborts(name: &'static str, line: &'static str, break_it: fn() -> u32) -> Rule {
    Rule { name, answer: Answer::Abort, line, break_it }
}

const BOTH: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

const RULES: &[Rule] = &[
    refuses(3, "a call before cuInit", "cuDeviceGetCount: cuInit was not called", || {
        driver!(cuDeviceGetCount(&mut 0))
    }),
    refuses(1, "a mapping of a part of a handle", "cuMemMap: the offset is not 0", || {
        driver!(cuMemMap(reserve(1), BLOCK, 4096, handle(), 0))
    }),
    refuses(1, "a mapping of another size", "cuMemMap: the size is not the handle's", || {
        driver!(cuMemMap(reserve(2), 2 * BLOCK, 0, handle(), 0))
    }),
    refuses(1, "a mapping over another", "cuMemMap: the addresses are mapped already", || {
        driver!(cuMemMap(mapped(1), BLOCK, 0, handle(), 0))
    }),
    refuses(1, "a mapping outside every range", "cuMemMap: outside a reserved range", || {
        driver!(cuMemMap(1 << 30, BLOCK, 0, handle(), 0))
    }),
    refuses(1, "access to a hole", "cuMemSetAccess: not whole mappings", || set_access(reserve(1), 1)),
    refuses(1, "freeing a range with a mapping", "cuMemAddressFree: the range still has mappings", || {
        driver!(cuMemAddressFree(mapped(1), BLOCK))
    }),
    refuses(1, "unmapping a part of a mapping", "cuMemUnmap: not whole mappings", || {
        let (base, (answer, handle)) = (reserve(2), create(2 * BLOCK));
        assert_eq!(answer, 0);
        ok!(cuMemMap(base, 2 * BLOCK, 0, handle, 0));
        driver!(cuMemUnmap(base, BLOCK))
    }),
    refuses(
        1,
        "a copy without access",
        "cuMemsetD8Async: the memory of the GPU is not mapped with access",
        || driver!(cuMemsetD8Async(mapped(1), 0, 1, stream())),
    ),
    refuses(201, "a stream without a context", "cuStreamCreateWithPriority: no context is current", || {
        ok!(cuCtxSetCurrent(null_mut()));
        driver!(cuStreamCreateWithPriority(&mut null_mut(), 1, 0))
    }),
    refuses(201, "an event without a context", "cuEventCreate: no context is current", || {
        ok!(cuCtxSetCurrent(null_mut()));
        driver!(cuEventCreate(&mut null_mut(), 0))
    }),
    refuses(1, "registering a private mapping", "cuMemHostRegister_v2: a private mapping of a file", || {
        register(page(MapFlags::PRIVATE, BOTH), 0)
    }),
    refuses(1, "registering read-only memory", "cuMemHostRegister_v2: a read-only mapping without", || {
        register(page(MapFlags::SHARED, ProtFlags::READ), 0)
    }),
    refuses(712, "registering twice", "cuMemHostRegister_v2: the memory is registered already", || {
        let page = page(MapFlags::SHARED, ProtFlags::READ);
        assert_eq!(register(page, sys::CU_MEMHOSTREGISTER_READ_ONLY), 0);
        register(page, sys::CU_MEMHOSTREGISTER_READ_ONLY)
    }),
    refuses(1, "registering no memory", "cuMemHostRegister_v2: the memory is not mapped", || {
        register(without_provenance_mut(4096), 0)
    }),
    refuses(500, "a kernel that the double lacks", "cuModuleGetFunction: no kernel millrace_other", || {
        function(c"millrace_other").0
    }),
    refuses(500, "a kernel that the text lacks", "cuModuleGetFunction: no kernel millrace_xor", || {
        function(c"millrace_xor").0
    }),
    refuses(1, "a kernel with other parameters", "cuModuleGetFunction: other parameters", || {
        function(c"millrace_flag").0
    }),
    refuses(400, "an unknown stream", "cuStreamSynchronize: not a stream", || {
        driver!(cuStreamSynchronize(without_provenance_mut(8)))
    }),
    aborts("unmapping under a copy", "cuMemUnmap: queued or running work names the range", || {
        driver!(cuMemUnmap(queued_copy().1, BLOCK))
    }),
    aborts("freeing the source of a copy", "cuMemFreeHost: queued or running work names the range", || {
        driver!(cuMemFreeHost(queued_copy().2))
    }),
    aborts("destroying a busy stream", "cuStreamDestroy_v2: the stream has queued work", || {
        driver!(cuStreamDestroy_v2(queued_copy().0))
    }),
    aborts("a wait without a recording", "cuEventSynchronize: the event was never recorded", || {
        driver!(cuEventSynchronize(event()))
    }),
    aborts("a stream's wait without a recording", "cuStreamWaitEvent: the event was never recorded", || {
        driver!(cuStreamWaitEvent(stream(), event(), 0))
    }),
];

/// Breaks the rule that this process has to break.
#[test]
fn scenario() {
    let Some(name) = support::scenario() else { return };
    if name == "new memory" {
        open();
        // SAFETY: the block is mapped with access.
        let block = unsafe { std::slice::from_raw_parts(usable() as *const u8, BLOCK) };
        assert!(block.iter().all(|byte| *byte == 0xA5));
        let (answer, _) = create(1 << 40);
        assert_eq!(answer, 2, "the GPU has less memory");
        return;
    }
    let rule = RULES.iter().find(|rule| rule.name == name).expect("the rule is known");
    if !rule.line.ends_with("cuInit was not called") {
        open();
    }
    let found = (rule.break_it)();
    match rule.answer {
        Answer::Code(code) => assert_eq!(found, code),
        Answer::Abort => panic!("the process goes on"),
    }
}

#[test]
fn a_broken_rule_is_answered_and_printed() {
    for rule in RULES {
        let Some(outcome) = support::run(rule.name, &[]) else { return };
        let line = format!("cuda double: {}", rule.line);
        assert!(outcome.errors.contains(&line), "{}: {outcome:#?}", rule.name);
        match rule.answer {
            Answer::Code(_) => assert!(outcome.status.success(), "{}: {outcome:#?}", rule.name),
            Answer::Abort => assert_eq!(outcome.status.signal(), Some(6), "{}: {outcome:#?}", rule.name),
        }
    }
}

#[test]
fn new_memory_is_filled_and_the_report_lists_what_was_left() {
    let Some(outcome) = support::run("new memory", &[]) else { return };
    assert!(outcome.status.success(), "{outcome:#?}");
    let report = outcome.report.expect("a report");
    let left =
        ["handles", "mappings", "reservations", "contexts", "streams"].map(|name| &report["left"][name]);
    assert_eq!(left, [1, 1, 1, 1, 0], "{report}");
    assert_eq!(report["calls"]["cuMemCreate"], 2);
}
