//! A timer finer than the runtime's, whose ticks are whole milliseconds. At a thousand requests per
//! second, such ticks would send requests in bursts.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use crate::clock;
use crate::failure::CommandFailure;

/// A kernel timer that the runtime awaits like a socket.
pub(super) struct Timer {
    fd: AsyncFd<OwnedFd>,
}

impl Timer {
    /// Creates a timer. Must be called within a runtime.
    pub(super) fn new() -> Result<Self, CommandFailure> {
        fn failed(error: impl std::fmt::Display) -> CommandFailure {
            CommandFailure::failed(format!("cannot create a timer: {error}"))
        }
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(failed)?;
        #[allow(
            deprecated,
            reason = "unsound only for types with a changeable descriptor: an OwnedFd keeps its own"
        )]
        let fd = AsyncFd::new(fd).map_err(failed)?;
        Ok(Self { fd })
    }

    /// Waits until a moment. Returns at once if the moment has passed.
    pub(super) async fn sleep_until(&self, moment: Instant) -> std::io::Result<()> {
        let left = moment.saturating_duration_since(clock::now());
        if left.is_zero() {
            return Ok(());
        }
        timerfd_settime(self.fd.get_ref(), TimerfdTimerFlags::empty(), &once_after(left))?;
        loop {
            let mut ready = self.fd.readable().await?;
            let mut expirations = [0; 8];
            match rustix::io::read(self.fd.get_ref(), &mut expirations) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn once_after(span: Duration) -> Itimerspec {
    let never = Timespec { tv_sec: 0, tv_nsec: 0 };
    let value = Timespec {
        tv_sec: i64::try_from(span.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: span.subsec_nanos().into(),
    };
    Itimerspec { it_interval: never, it_value: value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_timer_never_wakes_early_and_is_reusable() {
        let timer = Timer::new().unwrap();
        for micros in [300, 0, 1200] {
            let moment = clock::now() + Duration::from_micros(micros);
            timer.sleep_until(moment).await.unwrap();
            assert!(clock::now() >= moment);
        }
    }
}
