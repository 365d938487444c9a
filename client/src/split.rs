//! Where a request's time went, as the server reports it.

use std::time::Duration;

/// The parts of a request's time on the server, from the `Server-Timing` header of its answer
/// (`queue;dur=0.1, swap;dur=0, run;dur=1.5, total;dur=1.7`, in milliseconds).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    /// Waiting for the model to come into host memory from a worker's disk, a cold start; zero when it
    /// was there.
    pub cold: Duration,
    /// Accepted until given to a GPU, but for that.
    pub queue: Duration,
    /// Waiting for the model to come onto the GPU; zero when it was resident.
    pub swap: Duration,
    /// Computing.
    pub run: Duration,
    /// Received until answered, everything counted.
    pub total: Duration,
}

impl Split {
    /// Reads a `Server-Timing` header. `None` unless it has a `total` and nothing in it is
    /// malformed; parts it does not name are zero and names it does not know are skipped.
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

    /// What no part explains: reading, routing, hops and answering.
    #[must_use]
    pub fn other(&self) -> Duration {
        self.total.saturating_sub(self.cold + self.queue + self.swap + self.run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(queue: u64, swap: u64, run: u64, total: u64) -> Split {
        let us = Duration::from_micros;
        Split { cold: Duration::ZERO, queue: us(queue), swap: us(swap), run: us(run), total: us(total) }
    }

    #[test]
    fn reads_every_part_in_milliseconds() {
        let split = Split::parse("queue;dur=0.1, swap;dur=2, run;dur=1.5, total;dur=4").unwrap();
        assert_eq!(split, micros(100, 2000, 1500, 4000));
        assert_eq!(split.other(), Duration::from_micros(400));
    }

    #[test]
    fn a_cold_start_is_apart_from_the_swap() {
        let split =
            Split::parse("cold;dur=30, queue;dur=0.1, swap;dur=2, run;dur=1.5, total;dur=34").unwrap();
        let cold = Duration::from_millis(30);
        assert_eq!(split, Split { cold, ..micros(100, 2000, 1500, 34_000) });
        assert_eq!(split.other(), Duration::from_micros(400));
    }

    #[test]
    fn skips_what_it_does_not_know() {
        let header = "cache;desc=\"hit\", edge;dur=9, total;desc=all;dur=1";
        assert_eq!(Split::parse(header), Some(micros(0, 0, 0, 1000)));
    }

    #[test]
    fn refuses_what_it_cannot_read() {
        for header in ["", "miss", "run;dur=1", "total;dur=soon", "total;dur=-1", "total;dur=NaN"] {
            assert_eq!(Split::parse(header), None, "{header}");
        }
    }
}
