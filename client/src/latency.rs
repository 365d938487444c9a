//! The latency breakdown of a request, reported by the server.

use std::time::Duration;

/// The parts of a request's time on the server, parsed from the `Server-Timing` header of the
/// response (`queue;dur=0.1, swap;dur=0, run;dur=1.5, total;dur=1.7`, in milliseconds).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LatencyBreakdown {
    /// The wait for the model to be loaded from the worker's disk into host memory, a cold start.
    /// Zero if the model was in host memory.
    pub cold: Duration,
    /// The wait from admission to the assignment to a GPU, without the cold start.
    pub queue: Duration,
    /// The wait for the model to be copied onto the GPU. Zero if the model was resident.
    pub swap: Duration,
    /// The time that the model computed.
    pub run: Duration,
    /// The wait for SMs of a shared GPU while the model ran. Zero if the model had the whole GPU.
    pub token: Duration,
    /// The time from the request's arrival at the server to the response, with all other parts.
    pub total: Duration,
}

impl LatencyBreakdown {
    /// Parses a `Server-Timing` header. Metrics without a known name are skipped, and absent parts
    /// are zero. Returns `None` if the header has no `total` or a known part is malformed.
    #[must_use]
    pub fn parse(header: &str) -> Option<Self> {
        let mut split = Self::default();
        let mut complete = false;
        for metric in header.split(',') {
            let mut fields = metric.split(';').map(str::trim);
            let name = fields.next()?;
            let Some(dur) = fields.find_map(|field| field.strip_prefix("dur=")) else { continue };
            let part = match name {
                "cold" => &mut split.cold,
                "queue" => &mut split.queue,
                "swap" => &mut split.swap,
                "run" => &mut split.run,
                "token" => &mut split.token,
                "total" => {
                    complete = true;
                    &mut split.total
                }
                _ => continue,
            };
            *part = Duration::try_from_secs_f64(dur.parse::<f64>().ok()? / 1e3).ok()?;
        }
        complete.then_some(split)
    }

    /// Returns the time that no part covers: reading, routing, network hops and responding.
    #[must_use]
    pub fn other(&self) -> Duration {
        self.total.saturating_sub(self.cold + self.queue + self.swap + self.run + self.token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(queue: u64, swap: u64, run: u64, total: u64) -> LatencyBreakdown {
        let us = Duration::from_micros;
        LatencyBreakdown {
            cold: Duration::ZERO,
            queue: us(queue),
            swap: us(swap),
            run: us(run),
            token: Duration::ZERO,
            total: us(total),
        }
    }

    #[test]
    fn every_part_is_parsed_in_milliseconds() {
        let split = LatencyBreakdown::parse("queue;dur=0.1, swap;dur=2, run;dur=1.5, total;dur=4").unwrap();
        assert_eq!(split, micros(100, 2000, 1500, 4000));
        assert_eq!(split.other(), Duration::from_micros(400));
    }

    #[test]
    fn waits_for_a_shared_gpu_are_counted_apart_from_the_run() {
        let split =
            LatencyBreakdown::parse("queue;dur=0.1, swap;dur=2, run;dur=1.5, token;dur=3, total;dur=7")
                .unwrap();
        let token = Duration::from_millis(3);
        assert_eq!(split, LatencyBreakdown { token, ..micros(100, 2000, 1500, 7000) });
        assert_eq!(split.other(), Duration::from_micros(400));
    }

    #[test]
    fn a_cold_start_is_counted_apart_from_the_swap() {
        let split =
            LatencyBreakdown::parse("cold;dur=30, queue;dur=0.1, swap;dur=2, run;dur=1.5, total;dur=34")
                .unwrap();
        let cold = Duration::from_millis(30);
        assert_eq!(split, LatencyBreakdown { cold, ..micros(100, 2000, 1500, 34_000) });
        assert_eq!(split.other(), Duration::from_micros(400));
    }

    #[test]
    fn unknown_metrics_are_skipped() {
        let header = "cache;desc=\"hit\", edge;dur=9, total;desc=all;dur=1";
        assert_eq!(LatencyBreakdown::parse(header), Some(micros(0, 0, 0, 1000)));
    }

    #[test]
    fn malformed_headers_are_refused() {
        for header in ["", "miss", "run;dur=1", "total;dur=soon", "total;dur=-1", "total;dur=NaN"] {
            assert_eq!(LatencyBreakdown::parse(header), None, "{header}");
        }
    }
}
