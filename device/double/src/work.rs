//! Work of a stream, and the memory that the work uses.
#![allow(unsafe_code, reason = "reads and writes memory at addresses of the program")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use cudarc::driver::sys::{CUdevice, CUresult, CUresult::*};
use rustix::thread::{NanosleepRelativeResult, nanosleep};
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::calls::{CallOutcome, DriverCall};
use crate::event::Event;
use crate::faults;
use crate::host::PinState;
use crate::kernels::Launch;
use crate::mapping::{Access, overlap};
use crate::maps;
use crate::state::{State, state};
use crate::stream::DeviceStream;

/// Returns CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn monotonic_nanos() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The clock counts from boot, so it is never negative.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps for a time.
pub(crate) fn nap(nanos: u64) {
    let mut time =
        Timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as i64 };
    while let NanosleepRelativeResult::Interrupted(rest) = nanosleep(&time) {
        time = rest;
    }
}

/// Memory that work uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Touch {
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    pub(crate) write: bool,
    /// Whether the memory is host memory that is not pinned.
    pub(crate) pageable: bool,
}

impl Touch {
    pub(crate) fn read(at: u64, bytes: u64) -> Self {
        Self { at, bytes, write: false, pageable: false }
    }

    pub(crate) fn write(at: u64, bytes: u64) -> Self {
        Self { at, bytes, write: true, pageable: false }
    }

    /// Returns whether the work uses a byte of the range.
    pub(crate) fn uses(&self, at: u64, bytes: u64) -> bool {
        self.bytes > 0 && overlap((self.at, self.bytes), (at, bytes))
    }

    /// Checks that a device may use the memory now.
    pub(crate) fn check(&self, state: &State, device: CUdevice) -> Result<(), String> {
        let Self { at, bytes, write, pageable } = *self;
        let verb = if write { "write" } else { "read" };
        if bytes == 0 {
            return Ok(());
        }
        if pageable {
            let allowed = maps::allows(at, bytes, write);
            return if allowed {
                Ok(())
            } else {
                Err(format!("the process may not {verb} {at:#x}+{bytes:#x}"))
            };
        }
        let needed = if write { Access::ReadWrite } else { Access::Read };
        match state.memory.allows(at, bytes, device, needed) {
            Some(true) => return Ok(()),
            Some(false) => return Err(format!("device {device} may not {verb} {at:#x}+{bytes:#x}")),
            None => {}
        }
        match state.pinning(at, bytes) {
            PinState::Pinned { read_only: true } if write => Err(format!("{at:#x} is registered read-only")),
            PinState::Pinned { .. } => Ok(()),
            PinState::Mixed => Err(format!("{at:#x}+{bytes:#x} is registered only in part")),
            PinState::Pageable => Err(format!("{at:#x}+{bytes:#x} is neither mapped nor pinned")),
        }
    }
}

/// Comparison of a value in memory with the value of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The cyclic difference is not negative.
    Reached,
    Equal,
    /// A bit is set in both.
    AnyBit,
    /// A bit is clear in both.
    Nor,
}

impl Condition {
    fn holds(self, found: u32, value: u32) -> bool {
        match self {
            Self::Reached => found.wrapping_sub(value).cast_signed() >= 0,
            Self::Equal => found == value,
            Self::AnyBit => found & value != 0,
            Self::Nor => !(found | value) != 0,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Work {
    Copy { to: Touch, from: Touch },
    Fill { at: u64, bytes: u64, value: u8 },
    Launch(Launch),
    Record { event: Arc<Event>, generation: u64 },
    Wait { event: Arc<Event>, generation: u64 },
    AwaitValue { at: u64, value: u32, condition: Condition },
    WriteValue { at: u64, value: u32 },
}

/// Returns the 32-bit word at an address that was checked.
pub(crate) fn flag_at<'a>(at: u64) -> &'a AtomicU32 {
    // SAFETY: the address is aligned, and `Touch::check` found it mapped. The memory stays mapped, because
    // no call unmaps memory that queued work uses.
    unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(at as usize)) }
}

impl Work {
    /// Returns the memory that the work uses.
    pub(crate) fn touches(&self) -> Vec<Touch> {
        match self {
            Self::Copy { to, from } => vec![*to, *from],
            Self::Fill { at, bytes, .. } => vec![Touch::write(*at, *bytes)],
            Self::Launch(launch) => launch.touches(),
            Self::Record { .. } | Self::Wait { .. } => Vec::new(),
            Self::AwaitValue { at, .. } => vec![Touch::read(*at, 4)],
            Self::WriteValue { at, .. } => vec![Touch::write(*at, 4)],
        }
    }

    /// Carries out the work on the thread of its stream. The call is that which queued the work.
    pub(crate) fn run(&self, stream: &DeviceStream, call: &DriverCall) -> CallOutcome {
        let check = |touch: &Touch| touch.check(&state(), stream.device);
        if let Err(rule) = self.touches().iter().try_for_each(check) {
            return Err(call.broken(CUDA_ERROR_ILLEGAL_ADDRESS, rule));
        }
        match self {
            Self::Copy { to, from } => {
                // SAFETY: both ranges were checked above. They stay mapped while the work is queued, except
                // for pageable memory, which the program must keep.
                unsafe {
                    std::ptr::copy(
                        std::ptr::with_exposed_provenance::<u8>(from.at as usize),
                        std::ptr::with_exposed_provenance_mut::<u8>(to.at as usize),
                        to.bytes as usize,
                    );
                }
                Ok(())
            }
            Self::Fill { at, bytes, value } => {
                // SAFETY: the range was checked above, and stays mapped while the work is queued.
                unsafe {
                    std::ptr::with_exposed_provenance_mut::<u8>(*at as usize)
                        .write_bytes(*value, *bytes as usize);
                }
                Ok(())
            }
            Self::Launch(launch) => launch.run(stream, call),
            // The stream lets the event happen when it removes the work from its queue.
            Self::Record { .. } => Ok(()),
            Self::Wait { event, generation } => event.wait(*generation),
            Self::AwaitValue { at, value, condition } => {
                await_flag(*at, None, |found| condition.holds(found, *value))
            }
            Self::WriteValue { at, value } => {
                write_flag(*at, *value);
                Ok(())
            }
        }
    }
}

/// Writes a value after all earlier writes.
pub(crate) fn write_flag(at: u64, value: u32) {
    fence(Ordering::SeqCst);
    flag_at(at).store(value, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// Waits for a value, at most for a time.
pub(crate) fn await_flag(at: u64, most: Option<u64>, holds: impl Fn(u32) -> bool) -> Result<(), CUresult> {
    let start = monotonic_nanos();
    while !holds(flag_at(at).load(Ordering::SeqCst)) {
        if most.is_some_and(|most| monotonic_nanos() - start >= most) {
            return Ok(());
        }
        if let Some(code) = faults::ended_by() {
            return Err(code);
        }
        nap(10_000);
    }
    Ok(())
}
