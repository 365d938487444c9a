//! A stand-in for `libnvidia-ml.so.1`, which `tests/nvml_calls.rs` puts before a program. The library
//! answers the questions of `nvml/read.rs` and `nvml/health.rs` in the memory layout of nvml.h. The
//! answers say nothing about a real driver; the test shows that Millrace passes the right arguments
//! and reads the right fields.
//!
//! GPUs 0 and 1 have an NVLink between them and a fabric. GPU 1 has no events. GPU 2 is lost.
#![allow(unsafe_code, reason = "the functions of NVML have a C interface")]
#![allow(non_snake_case, clippy::missing_safety_doc, reason = "the names and contracts are those of nvml.h")]

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

/// A device handle is the GPU's index plus 1, so that no handle is null.
type Device = usize;

const SUCCESS: u32 = 0;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const TIMEOUT: u32 = 10;
const GPU_IS_LOST: u32 = 15;
const LOST: Device = 3;

/// Writes an answer, unless the GPU is lost.
unsafe fn answer<T>(device: Device, to: *mut T, value: T) -> u32 {
    if device == LOST {
        return GPU_IS_LOST;
    }
    // SAFETY: NVML's contract lets each function write its answer to the pointer.
    unsafe { to.write(value) };
    SUCCESS
}

unsafe fn answer_text(device: Device, to: *mut c_char, length: u32, text: &str) -> u32 {
    if device == LOST {
        return GPU_IS_LOST;
    }
    assert!(text.len() < length as usize);
    // SAFETY: NVML's contract gives the buffer's length; the text and its end fit.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        to.add(text.len()).write(0);
    }
    SUCCESS
}

/// Defines functions of NVML that answer with a single value.
macro_rules! answers {
    ($($name:ident($device:ident, $($argument:ident: $kind:ty),*) -> $type:ty = $value:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($device: Device, $($argument: $kind,)* to: *mut $type) -> u32 {
            $(let _ = &$argument;)*
            // SAFETY: as for `answer`.
            unsafe { answer($device, to, $value) }
        }
    )* };
}

answers! {
    nvmlDeviceGetMaxPcieLinkGeneration(device,) -> u32 = 5;
    nvmlDeviceGetMaxPcieLinkWidth(device,) -> u32 = 16;
    nvmlDeviceGetTopologyCommonAncestor(device, other: Device) -> u32 = if other == LOST { return GPU_IS_LOST } else { 10 };
    nvmlDeviceGetP2PStatus(device, other: Device, index: u32) -> u32 = if other == LOST { return GPU_IS_LOST } else { index };
    nvmlDeviceGetNvLinkVersion(device, link: u32) -> u32 = 6;
    nvmlDeviceGetNvLinkRemoteDeviceType(device, link: u32) -> u32 = 0;
    nvmlDeviceGetTemperature(device, sensor: u32) -> u32 = 40;
    nvmlDeviceGetPowerUsage(device,) -> u32 = 70_000;
    nvmlDeviceGetPcieThroughput(device, counter: u32) -> u32 = 1000 + counter;
    nvmlDeviceGetClockInfo(device, clock: u32) -> u32 = 1000 + clock;
    nvmlDeviceGetUtilizationRates(device,) -> [u32; 2] = [7, 8];
    nvmlDeviceGetCurrentClocksThrottleReasons(device,) -> u64 = 1;
    nvmlDeviceGetCurrentClocksEventReasons(device,) -> u64 = 1;
    nvmlDeviceGetSupportedEventTypes(device,) -> u64 = if device == 2 { 0 } else { 2 | 4 | 8 };
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> u32 {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> u32 {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, length: u32) -> u32 {
    let version = std::env::var("FAKE_DRIVER").unwrap_or_else(|_| "580.1".to_owned());
    // SAFETY: as for `answer_text`.
    unsafe { answer_text(0, to, length, &version) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(to: *mut i32) -> u32 {
    // SAFETY: as for `answer`.
    unsafe { answer(0, to, 13_000) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(to: *mut u32) -> u32 {
    let count = std::env::var("FAKE_GPUS").ok().and_then(|count| count.parse().ok());
    // SAFETY: as for `answer`.
    unsafe { answer(0, to, count.unwrap_or(3)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, to: *mut Device) -> u32 {
    // SAFETY: as for `answer`.
    unsafe { answer(0, to, index as Device + 1) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut Device) -> u32 {
    // SAFETY: NVML's contract wants a text that ends in 0, here of at least five bytes: `GPU-0`.
    let digit = unsafe { uuid.add(4).read() } as u8;
    // SAFETY: as for `answer`.
    unsafe { answer(0, to, usize::from(digit - b'0') + 1) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: Device, to: *mut c_char, length: u32) -> u32 {
    let uuid = format!("GPU-{}", device - 1);
    // A lost GPU keeps the UUID that the driver has read before. SAFETY: as for `answer_text`.
    unsafe { answer_text(0, to, length, &uuid) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: Device, to: *mut c_char, length: u32) -> u32 {
    // SAFETY: as for `answer_text`.
    unsafe { answer_text(device, to, length, "NVIDIA H100 80GB HBM3") }
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct Memory {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, to: *mut Memory) -> u32 {
    let memory = Memory { version: 0, total: 80 << 30, reserved: 1 << 30, free: 74 << 30, used: 5 << 30 };
    // SAFETY: as for `answer`.
    unsafe { answer(device, to, memory) }
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct Pci {
    legacy: [u8; 16],
    numbers: [u32; 5],
    bus_id: [u8; 32],
}

/// Returns an address in a domain that no machine has, so that the kernel knows nothing of the GPU.
fn pci(device: Device) -> Pci {
    let text = format!("0000FFFE:{device:02X}:00.0");
    let mut bus_id = [0; 32];
    bus_id[..text.len()].copy_from_slice(text.as_bytes());
    Pci { legacy: [0; 16], numbers: [0; 5], bus_id }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: Device, to: *mut Pci) -> u32 {
    // SAFETY: as for `answer`.
    unsafe { answer(device, to, pci(device)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Device, _: u32, to: *mut Pci) -> u32 {
    // SAFETY: as for `answer`.
    unsafe { answer(device, to, pci(3 - device)) }
}

/// Links 0 and 1 are active, link 2 is not, and there are no others.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkState(device: Device, link: u32, to: *mut u32) -> u32 {
    match link {
        // SAFETY: as for `answer`.
        0..3 => unsafe { answer(device, to, u32::from(link < 2)) },
        _ => INVALID_ARGUMENT,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Device,
    major: *mut i32,
    minor: *mut i32,
) -> u32 {
    // SAFETY: as for `answer`.
    unsafe { answer(device, major, 9).max(answer(device, minor, 0)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(_: Device, _: *mut u32, _: *mut u32) -> u32 {
    NOT_SUPPORTED
}

/// CPUs 0, 1 and 64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCpuAffinity(device: Device, words: u32, to: *mut u64) -> u32 {
    assert!(words >= 2);
    // SAFETY: as for `answer`; NVML's contract gives the number of words.
    unsafe { answer(device, to, 0b11).max(answer(device, to.add(1), 1)) }
}

/// NUMA node 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryAffinity(
    device: Device,
    _words: u32,
    to: *mut u64,
    scope: u32,
) -> u32 {
    assert_eq!(scope, 0, "the scope is the NUMA node");
    // SAFETY: as for `answer`.
    unsafe { answer(device, to, 0b10) }
}

/// `nvmlGpuFabricInfo_v2_t`.
#[repr(C)]
pub struct FabricInfo {
    version: u32,
    cluster: [u8; 16],
    status: u32,
    clique: u32,
    state: u8,
    health: u32,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfoV(device: Device, to: *mut FabricInfo) -> u32 {
    // SAFETY: NVML's contract wants the version in the first field.
    let version = unsafe { (*to).version };
    assert_eq!(version, 36 | (2 << 24));
    let info = FabricInfo { version, cluster: [0xAB; 16], status: 0, clique: 4, state: 3, health: 0 };
    // SAFETY: as for `answer`.
    unsafe { answer(device, to, info) }
}

/// `nvmlFieldValue_t`.
#[repr(C)]
pub struct FieldValue {
    field: u32,
    scope: u32,
    timestamp: i64,
    latency: i64,
    value_type: u32,
    status: u32,
    value: u64,
}

/// Every link has 26,562 MB/s, and every GPU needs a restart of the machine (2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: Device,
    count: i32,
    values: *mut FieldValue,
) -> u32 {
    if device == LOST {
        return GPU_IS_LOST;
    }
    assert_eq!(count, 1);
    // SAFETY: NVML's contract gives the number of values.
    let value = unsafe { &mut *values };
    value.value_type = 1;
    value.value = match value.field {
        90 => 26_562,
        230 => 2,
        field => panic!("field {field} is not asked for"),
    };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(to: *mut usize) -> u32 {
    // SAFETY: as for `answer`.
    unsafe { answer(0, to, 1) }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(_: usize) -> u32 {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(device: Device, events: u64, _set: usize) -> u32 {
    match (device, events) {
        (1, 10) => SUCCESS,
        (2, 0) => NOT_SUPPORTED,
        (LOST, _) => GPU_IS_LOST,
        _ => INVALID_ARGUMENT,
    }
}

/// `nvmlEventData_t`.
#[repr(C)]
pub struct EventData {
    device: Device,
    kind: u64,
    data: u64,
    instances: [u32; 2],
}

/// Events of GPU 0: a program's Xid, another Xid, an ECC error. Then there are no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(_set: *mut c_void, to: *mut EventData, _timeout_ms: u32) -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (kind, data) = match NEXT.fetch_add(1, Ordering::Relaxed) {
        0 => (8, 31),
        1 => (8, 79),
        2 => (2, 0),
        _ => return TIMEOUT,
    };
    // SAFETY: as for `answer`.
    unsafe { answer(0, to, EventData { device: 1, kind, data, instances: [u32::MAX; 2] }) }
}
