//! The fault service: injects faults into the clock and the disk of this controller. The internal port
//! offers the service only if the controller was started with fault injection.

use std::sync::Arc;
use std::time::Duration;

use millrace_proto::fault::{self as api, fault_server};
use millrace_proto::status::to_status;
use millrace_raft_store::{DiskStall, LogDisk};
use millrace_types::Failure;
use tonic::{Request, Response, Status};

use crate::clock::MovedClock;

/// The largest clock offset in either direction: 366 days.
const CLOCK_OFFSET_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// The longest stall of a single sync.
const STALL_EACH_SYNC_MAX: Duration = Duration::from_secs(60);
/// The longest stall, unless a client clears the stall earlier.
const STALL_FOR_MAX: Duration = Duration::from_secs(600);

/// The clock and the disk of this controller.
#[derive(Debug, Clone)]
pub(crate) struct FaultService {
    pub(crate) clock: Arc<MovedClock>,
    pub(crate) disk: LogDisk,
}

type Answer = Result<Response<api::Faults>, Status>;

impl FaultService {
    fn faults(&self) -> api::Faults {
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let stall = self.disk.stalled();
        api::Faults {
            clock_offset_ms: self.clock.offset_ms(),
            each_sync_ms: stall.map_or(0, |it| millis(it.each_sync)),
            stall_left_ms: stall.map_or(0, |it| millis(it.left)),
        }
    }
}

/// Returns the requested clock offset in milliseconds, or a refusal.
fn offset(request: api::SetClockOffsetRequest) -> Result<i64, Failure> {
    let offset = request.offset_ms;
    if Duration::from_millis(offset.unsigned_abs()) > CLOCK_OFFSET_MAX {
        let max = CLOCK_OFFSET_MAX.as_millis();
        return refused(format!("offset_ms is {offset}: give at most {max} in either direction"));
    }
    Ok(offset)
}

/// Returns the requested stall, or a refusal.
fn stall(request: api::StallDiskRequest) -> Result<DiskStall, Failure> {
    let span = |name: &str, given_ms: u64, max: Duration| match given_ms {
        0 => refused(format!("{name} is 0: give milliseconds, or clear the faults to end a stall")),
        _ if Duration::from_millis(given_ms) > max => {
            refused(format!("{name} is {given_ms}: give at most {}", max.as_millis()))
        }
        _ => Ok(Duration::from_millis(given_ms)),
    };
    Ok(DiskStall {
        each_sync: span("each_sync_ms", request.each_sync_ms, STALL_EACH_SYNC_MAX)?,
        left: span("for_ms", request.for_ms, STALL_FOR_MAX)?,
    })
}

fn refused<T>(message: String) -> Result<T, Failure> {
    Err(Failure::malformed(message))
}

#[tonic::async_trait]
impl fault_server::Fault for FaultService {
    async fn set_clock_offset(&self, request: Request<api::SetClockOffsetRequest>) -> Answer {
        let offset_ms = offset(request.into_inner()).map_err(|failure| to_status(&failure))?;
        tracing::warn!(offset_ms, "fault injection: moving the clock");
        self.clock.set_offset_ms(offset_ms);
        Ok(Response::new(self.faults()))
    }

    async fn stall_disk(&self, request: Request<api::StallDiskRequest>) -> Answer {
        let stall = stall(request.into_inner()).map_err(|failure| to_status(&failure))?;
        let DiskStall { each_sync, left } = stall;
        tracing::warn!(?each_sync, lasts = ?left, "fault injection: stalling the log's disk");
        self.disk.stall(stall);
        Ok(Response::new(self.faults()))
    }

    async fn clear(&self, _: Request<api::ClearRequest>) -> Answer {
        tracing::warn!("fault injection: clearing every fault");
        self.clock.set_offset_ms(0);
        self.disk.clear();
        Ok(Response::new(self.faults()))
    }

    async fn get_faults(&self, _: Request<api::GetFaultsRequest>) -> Answer {
        Ok(Response::new(self.faults()))
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::Reason;

    use super::*;

    #[test]
    fn faults_out_of_bounds_are_refused_with_the_bound() {
        let check = |refusal: Result<(), Failure>, says: &str| {
            let failure = refusal.unwrap_err();
            assert_eq!(failure.reason, Reason::MalformedRequest);
            assert!(failure.message.contains(says), "{failure}");
        };
        let moved = |offset_ms| offset(api::SetClockOffsetRequest { offset_ms });
        let year = i64::try_from(CLOCK_OFFSET_MAX.as_millis()).unwrap();
        assert_eq!([moved(year), moved(-year), moved(0)], [Ok(year), Ok(-year), Ok(0)]);
        for beyond in [year + 1, -year - 1, i64::MIN, i64::MAX] {
            check(moved(beyond).map(|_| ()), "at most 31622400000 in either direction");
        }
        let stalled = |each_sync_ms, for_ms| stall(api::StallDiskRequest { each_sync_ms, for_ms });
        let most = DiskStall { each_sync: STALL_EACH_SYNC_MAX, left: STALL_FOR_MAX };
        assert_eq!(stalled(60_000, 600_000), Ok(most));
        check(stalled(0, 1).map(|_| ()), "each_sync_ms is 0");
        check(stalled(1, 0).map(|_| ()), "for_ms is 0");
        check(stalled(60_001, 1).map(|_| ()), "at most 60000");
        check(stalled(1, u64::MAX).map(|_| ()), "at most 600000");
    }
}
