//! Watches the health of the GPUs, and samples their load.
//!
//! A thread waits for Xids and for double-bit ECC errors, and asks each GPU for its temperature now
//! and then, because a GPU that fell off the bus sends no event. [`verdict`] is the pure part: it
//! decides whether a fault is a program's own or makes the GPU unusable. The thread only reports; the
//! caller drains the GPU.

use std::collections::BTreeSet;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::event::EventData;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use nvml_wrapper::{Device, EventSet};

use super::error::Error;
use super::read::{Nvml, field_value, is_lost, refused};

/// Longest time that the thread waits for an event. The thread looks for lost GPUs and for its own
/// end after each wait.
const WAIT: Duration = Duration::from_secs(1);

/// Xids that a program causes by its own error, and after which other programs can use the GPU: the
/// list of NVIDIA's device plugin for Kubernetes.
const PROGRAM_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// Number that NVML gives an Xid that it does not know.
const XID_UNKNOWN: u64 = 999;

/// A fault that NVML reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuFault {
    /// The driver logged an Xid; 999 is an Xid that NVML does not know.
    Xid(u64),
    /// The memory had an error that ECC cannot correct.
    DoubleBitEcc,
    /// The GPU fell off the bus, or answers nothing before a reset.
    GpuLost,
}

/// The driver's advice after a fault (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    /// The GPU needs no recovery.
    None,
    /// The GPU needs a reset.
    GpuReset,
    /// The machine needs a restart.
    NodeReboot,
    /// Programs must stop to use the GPU's peers.
    DrainP2p,
    /// Programs must leave the GPU, and the GPU needs a reset.
    DrainAndReset,
    /// Advice that this program does not know.
    Other(u64),
}

impl RecoveryAction {
    /// Returns the advice for a value of the field `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
    #[must_use]
    pub fn from_code(code: u64) -> Self {
        match code {
            0 => Self::None,
            1 => Self::GpuReset,
            2 => Self::NodeReboot,
            3 => Self::DrainP2p,
            4 => Self::DrainAndReset,
            other => Self::Other(other),
        }
    }
}

/// The state of a GPU after a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuVerdict {
    /// A program caused the fault and lost its context; the GPU is healthy.
    ProgramFault,
    /// The GPU works on, with less than its full function.
    Degraded,
    /// No program should use the GPU: drain it.
    Unhealthy,
}

/// A fault of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthEvent {
    /// UUID of the whole GPU, also if the fault is in a MIG instance.
    pub gpu: String,
    /// Number of the Xid, if the fault is one.
    pub xid: Option<u64>,
    /// State of the GPU after the fault.
    pub verdict: GpuVerdict,
    /// Fault and advice for logs, without the GPU's name.
    pub text: String,
}

impl HealthEvent {
    fn new(gpu: String, fault: GpuFault, recovery: Option<RecoveryAction>) -> Self {
        Self {
            gpu,
            xid: if let GpuFault::Xid(xid) = fault { Some(xid) } else { None },
            verdict: verdict(fault, recovery),
            text: text(fault, recovery),
        }
    }
}

/// Returns whether a program causes this Xid by its own error, so that the GPU is healthy.
#[must_use]
pub fn is_program_fault(xid: u64) -> bool {
    PROGRAM_XIDS.contains(&xid)
}

/// Returns the state of a GPU after a fault. `recovery` is `None` if the driver gives no advice, as
/// older ones do not: then a fault that is no program's own makes the GPU unhealthy.
#[must_use]
pub fn verdict(fault: GpuFault, recovery: Option<RecoveryAction>) -> GpuVerdict {
    match fault {
        GpuFault::GpuLost => GpuVerdict::Unhealthy,
        GpuFault::Xid(xid) if is_program_fault(xid) => GpuVerdict::ProgramFault,
        GpuFault::Xid(_) | GpuFault::DoubleBitEcc => match recovery {
            Some(RecoveryAction::None) => GpuVerdict::Degraded,
            _ => GpuVerdict::Unhealthy,
        },
    }
}

fn text(fault: GpuFault, recovery: Option<RecoveryAction>) -> String {
    let fault_text = match fault {
        GpuFault::GpuLost => return "the GPU fell off the bus or needs a reset".to_owned(),
        GpuFault::Xid(xid) if is_program_fault(xid) => return format!("Xid {xid}: a program's own fault"),
        GpuFault::Xid(xid) => format!("Xid {xid}"),
        GpuFault::DoubleBitEcc => "memory error that ECC cannot correct".to_owned(),
    };
    let advice = match recovery {
        None => "the driver gives no advice".to_owned(),
        Some(RecoveryAction::None) => "the driver asks for no recovery".to_owned(),
        Some(RecoveryAction::GpuReset) => "the driver asks for a reset of the GPU".to_owned(),
        Some(RecoveryAction::NodeReboot) => "the driver asks for a restart of the machine".to_owned(),
        Some(RecoveryAction::DrainP2p) => "the driver asks for an end of peer access".to_owned(),
        Some(RecoveryAction::DrainAndReset) => {
            "the driver asks for a drain and a reset of the GPU".to_owned()
        }
        Some(RecoveryAction::Other(code)) => format!("the driver asks for recovery {code}, which is unknown"),
    };
    format!("{fault_text}: {advice}")
}

/// A running watch over the GPUs' health. Ends when dropped, which takes up to a second.
#[derive(Debug)]
pub struct HealthWatch {
    /// Dropped to end the thread.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    without_events: Vec<String>,
}

impl HealthWatch {
    /// Returns the UUIDs of the GPUs for which NVML has no events: only their loss is noticed.
    #[must_use]
    pub fn without_events(&self) -> &[String] {
        &self.without_events
    }
}

impl Drop for HealthWatch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the callback has been reported already, by the panic hook.
            drop(thread.join());
        }
    }
}

impl Nvml {
    /// Starts a thread that calls `on_event` for each fault of a GPU, until the returned watch is
    /// dropped. The loss of a GPU is reported once. If several Xids arrive together, NVML reports
    /// the newest for each.
    ///
    /// # Errors
    /// [`Error::Thread`]; [`Error::Nvml`] if the GPUs cannot be counted.
    pub fn watch_health(
        &self,
        on_event: impl FnMut(HealthEvent) + Send + 'static,
    ) -> Result<HealthWatch, Error> {
        let nvml = self.clone();
        let count = self.library.device_count().map_err(refused("count the GPUs"))?;
        let (stop, stopped) = mpsc::channel();
        let (ready, registered) = mpsc::channel();
        let watch = move || {
            let devices: Vec<Device<'_>> =
                (0..count).filter_map(|index| nvml.library.device_by_index(index).ok()).collect();
            let uuid = |device: &Device<'_>| device.uuid().unwrap_or_else(|_| "unknown".to_owned());
            let devices: Vec<_> = devices.into_iter().map(|device| (uuid(&device), device)).collect();
            let (events, without_events) = register(&nvml, &devices);
            // Sending cannot fail, because the caller waits for this message.
            drop(ready.send(without_events));
            watch(&devices, events.as_ref(), &stopped, on_event);
        };
        let thread = std::thread::Builder::new().name("nvml-health".to_owned()).spawn(watch);
        let thread = thread.map_err(|error| Error::Thread(error.to_string()))?;
        let without_events = registered.recv().map_err(|error| Error::Thread(error.to_string()))?;
        Ok(HealthWatch { stop: Some(stop), thread: Some(thread), without_events })
    }

    /// Samples the load of a GPU. Takes some 40 ms, because the driver counts PCIe bytes for 20 ms in
    /// each direction: not for an actor's thread.
    ///
    /// # Errors
    /// [`Error::GpuLost`]; [`Error::Nvml`] if no GPU has the UUID.
    pub fn sample(&self, uuid: &str) -> Result<GpuSample, Error> {
        let sample = || -> Result<GpuSample, NvmlError> {
            let device = self.library.device_by_uuid(uuid)?;
            let utilization = answered(device.utilization_rates())?;
            let throughput = |counter| answered(device.pcie_throughput(counter));
            let rate = |kb_per_s: u32| BytesPerSec(u64::from(kb_per_s) * 1000);
            let throttle = answered(device.current_throttle_reasons())?;
            Ok(GpuSample {
                gpu_percent: utilization.as_ref().map(|rates| rates.gpu),
                memory_percent: utilization.as_ref().map(|rates| rates.memory),
                memory_used: answered(device.memory_info())?.map(|memory| Bytes(memory.used)),
                temperature_celsius: answered(device.temperature(TemperatureSensor::Gpu))?,
                throttle_reasons: throttle
                    .map(|reasons| reasons.iter_names().map(|(name, _)| name).collect()),
                power_milliwatts: answered(device.power_usage())?,
                pcie_to_gpu: throughput(PcieUtilCounter::Receive)?.map(rate),
                pcie_from_gpu: throughput(PcieUtilCounter::Send)?.map(rate),
                sm_clock_mhz: answered(device.clock_info(Clock::SM))?,
                memory_clock_mhz: answered(device.clock_info(Clock::Memory))?,
            })
        };
        sample().map_err(|error| match error {
            error if is_lost(&error) => Error::GpuLost { gpu: uuid.to_owned(), reason: error.to_string() },
            error => refused("find the GPU by its UUID")(error),
        })
    }
}

/// Load and condition of a GPU at a moment. A field is `None` if the GPU does not report it; a MIG
/// instance reports little besides its memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuSample {
    /// Part of the last sample period in which a kernel ran, in percent.
    pub gpu_percent: Option<u32>,
    /// Part of the last sample period in which GPU memory was read or written, in percent.
    pub memory_percent: Option<u32>,
    /// Allocated memory.
    pub memory_used: Option<Bytes>,
    /// Temperature of the die in degrees Celsius.
    pub temperature_celsius: Option<u32>,
    /// Reasons for which the clocks are below their maximum, by nvml-wrapper's names, such as
    /// `HW_SLOWDOWN`.
    pub throttle_reasons: Option<Vec<&'static str>>,
    /// Power draw in milliwatts.
    pub power_milliwatts: Option<u32>,
    /// Rate of PCIe transfers to the GPU.
    pub pcie_to_gpu: Option<BytesPerSec>,
    /// Rate of PCIe transfers from the GPU.
    pub pcie_from_gpu: Option<BytesPerSec>,
    /// Clock of the multiprocessors in MHz.
    pub sm_clock_mhz: Option<u32>,
    /// Clock of the memory in MHz.
    pub memory_clock_mhz: Option<u32>,
}

/// Returns the answer, or `None` if the GPU does not know. Fails only if the GPU is lost.
fn answered<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if is_lost(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Registers the events of all GPUs that have some. Returns the set, and the UUIDs of the GPUs that
/// are not in the set.
fn register<'nvml>(
    nvml: &'nvml Nvml,
    devices: &[(String, Device<'nvml>)],
) -> (Option<EventSet<'nvml>>, Vec<String>) {
    let mut open: Vec<_> = devices.iter().collect();
    let mut refusing = Vec::new();
    while !open.is_empty()
        && let Ok(set) = nvml.library.create_event_set()
    {
        match register_all(&open, set) {
            Ok(set) => return (Some(set), refusing),
            Err(place) => refusing.push(open.remove(place).0.clone()),
        }
    }
    refusing.extend(open.into_iter().map(|(uuid, _)| uuid.clone()));
    (None, refusing)
}

/// Registers the events of these GPUs. Fails with the place of the first GPU that refuses: the
/// wrapper then frees the set, with the events of the GPUs before.
fn register_all<'nvml>(
    devices: &[&(String, Device<'nvml>)],
    set: EventSet<'nvml>,
) -> Result<EventSet<'nvml>, usize> {
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    devices.iter().enumerate().try_fold(set, |set, (place, (_, device))| {
        let events = device.supported_event_types().unwrap_or(wanted) & wanted;
        device.register_events(events, set).map_err(|_| place)
    })
}

fn watch(
    devices: &[(String, Device<'_>)],
    events: Option<&EventSet<'_>>,
    stopped: &mpsc::Receiver<()>,
    mut on_event: impl FnMut(HealthEvent),
) {
    let mut lost = BTreeSet::new();
    loop {
        // Without a set, and after an error that would return at once, the wait is for the end.
        let wait_for_end = match events.map(|events| events.wait(WAIT.as_millis() as u32)) {
            Some(Ok(event)) => {
                report(&event, &mut on_event);
                Duration::ZERO
            }
            Some(Err(NvmlError::Timeout)) => Duration::ZERO,
            Some(Err(_)) | None => WAIT,
        };
        if stopped.recv_timeout(wait_for_end) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        for (uuid, device) in devices {
            let is_gone = device.temperature(TemperatureSensor::Gpu).is_err_and(|error| is_lost(&error));
            if is_gone && lost.insert(uuid) {
                on_event(HealthEvent::new(uuid.clone(), GpuFault::GpuLost, None));
            }
        }
    }
}

fn report(event: &EventData<'_>, on_event: &mut impl FnMut(HealthEvent)) {
    let fault = match event.event_data {
        Some(XidError::Value(xid)) => GpuFault::Xid(xid),
        Some(XidError::Unknown) => GpuFault::Xid(XID_UNKNOWN),
        None => GpuFault::DoubleBitEcc,
    };
    let recovery = match fault {
        GpuFault::Xid(xid) if is_program_fault(xid) => None,
        _ => field_value(&event.device, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).ok(),
    };
    let gpu = event.device.uuid().unwrap_or_else(|_| "unknown".to_owned());
    on_event(HealthEvent::new(gpu, fault, recovery.map(RecoveryAction::from_code)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xids_of_programs_leave_the_gpu_healthy_and_others_follow_the_driver() {
        let check = |fault, recovery, expected| assert_eq!(verdict(fault, recovery), expected, "{fault:?}");
        for xid in [13, 31, 43, 45, 68, 109] {
            check(GpuFault::Xid(xid), None, GpuVerdict::ProgramFault);
            check(GpuFault::Xid(xid), Some(RecoveryAction::GpuReset), GpuVerdict::ProgramFault);
        }
        for fault in [
            GpuFault::Xid(48),
            GpuFault::Xid(79),
            GpuFault::Xid(94),
            GpuFault::Xid(999),
            GpuFault::DoubleBitEcc,
        ] {
            check(fault, Some(RecoveryAction::None), GpuVerdict::Degraded);
            check(fault, None, GpuVerdict::Unhealthy);
            for code in 1..=5 {
                check(fault, Some(RecoveryAction::from_code(code)), GpuVerdict::Unhealthy);
            }
        }
        check(GpuFault::GpuLost, Some(RecoveryAction::None), GpuVerdict::Unhealthy);
    }

    #[test]
    fn events_say_the_fault_and_the_advice() {
        let check = |fault, recovery, xid, text: &str| {
            let event = HealthEvent::new("GPU-1".to_owned(), fault, recovery);
            assert_eq!((event.xid, event.text.as_str()), (xid, text));
        };
        check(GpuFault::Xid(31), None, Some(31), "Xid 31: a program's own fault");
        check(GpuFault::Xid(79), None, Some(79), "Xid 79: the driver gives no advice");
        let restart = Some(RecoveryAction::NodeReboot);
        check(
            GpuFault::Xid(119),
            restart,
            Some(119),
            "Xid 119: the driver asks for a restart of the machine",
        );
        let none = Some(RecoveryAction::None);
        check(
            GpuFault::DoubleBitEcc,
            none,
            None,
            "memory error that ECC cannot correct: the driver asks for no recovery",
        );
        check(GpuFault::GpuLost, None, None, "the GPU fell off the bus or needs a reset");
    }
}
