//! The values in scenario files.

use std::time::Duration;

use millrace_types::Bytes;
use rand::Rng as _;
use rand::rngs::StdRng;
use serde::Deserialize;

/// A duration: `1500ms`, or `2s..10s` for a duration between the two, drawn from the seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct DurationRange {
    pub(crate) least: Duration,
    pub(crate) most: Duration,
}

impl DurationRange {
    pub(crate) const fn exactly(span: Duration) -> Self {
        Self { least: span, most: span }
    }

    /// Draws a duration from the range.
    pub(crate) fn draw(self, rng: &mut StdRng) -> Duration {
        if self.least == self.most { self.least } else { rng.random_range(self.least..self.most) }
    }

    pub(crate) fn is_exact(self) -> bool {
        self.least == self.most
    }
}

impl TryFrom<String> for DurationRange {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let read = |text: &str| {
            humantime::parse_duration(text.trim())
                .map_err(|error| format!("{text:?} is not a time ({error}): write 1500ms, 2s or 2s..10s"))
        };
        let (least, most) = match text.split_once("..") {
            Some((least, most)) => (read(least)?, read(most)?),
            None => (read(&text)?, read(&text)?),
        };
        if least > most {
            return Err(format!("the range {text:?} ends before it begins"));
        }
        Ok(Self { least, most })
    }
}

/// An amount of memory, such as `256MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct MemorySize(pub(crate) u64);

impl TryFrom<String> for MemorySize {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse::<Bytes>().map(|size| Self(size.get())).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    fn span(text: &str) -> Result<DurationRange, String> {
        DurationRange::try_from(text.to_owned())
    }

    #[test]
    fn a_span_is_a_single_time_or_a_range() {
        let ms = Duration::from_millis;
        assert_eq!(span("1500ms"), Ok(DurationRange::exactly(ms(1500))));
        assert_eq!(span("2s .. 10s"), Ok(DurationRange { least: ms(2_000), most: ms(10_000) }));
        assert!(span("10s..2s").unwrap_err().contains("before"));
        assert!(span("soon").unwrap_err().contains("2s..10s"));
        let mut rng = StdRng::seed_from_u64(1);
        let drawn = span("2s..10s").unwrap().draw(&mut rng);
        assert!(drawn >= ms(2_000) && drawn < ms(10_000), "{drawn:?}");
        assert_eq!(span("2s").unwrap().draw(&mut rng), ms(2_000));
    }
}
