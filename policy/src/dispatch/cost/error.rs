//! How wrong the cost model was: of each turn, what was predicted when its request was given to the
//! GPU against what came.

use std::time::Duration;

use super::{Source, nanos};

/// What a turn had to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Predicted {
    /// Run: the model was there.
    Run,
    /// Load it from the host, and run.
    Load,
    /// Copy it from another GPU, and run.
    Copy,
}

impl Predicted {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Load => "load",
            Self::Copy => "copy",
        }
    }
}

/// How wrong predictions of turns were.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PredictionError {
    /// On GPUs of this [kind](crate::dispatch::GpuConfig::kind).
    pub kind: u32,
    /// Turns that had this to do.
    pub turn: Predicted,
    /// So many.
    pub predictions: u64,
    /// By how much they were off together, in thousandths of what came.
    pub thousandths: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    predictions: u64,
    /// Of errors in thousandths of what came.
    thousandths: u64,
}

/// Sums by kind of GPU and by [`Predicted`].
#[derive(Debug, Default)]
pub(in crate::dispatch) struct Errors(Vec<[Sum; 3]>);

/// No prediction counts as worse than this, in thousandths of what came: a turn that took next to
/// nothing would hide all others.
const ERROR_MAX: u64 = 10_000;

impl Errors {
    pub(in crate::dispatch) fn add(
        &mut self,
        kind: u32,
        source: Source,
        predicted: Duration,
        came: Duration,
    ) {
        let kind = kind as usize;
        if self.0.len() <= kind {
            self.0.resize(kind + 1, Default::default());
        }
        let turn = match source {
            Source::Here => Predicted::Run,
            Source::Host | Source::SharedHost => Predicted::Load,
            Source::Peer(_) => Predicted::Copy,
        };
        let off = nanos(predicted).abs_diff(nanos(came));
        let thousandths = u128::from(off) * 1000 / u128::from(nanos(came).max(1));
        let sum = &mut self.0[kind][turn as usize];
        sum.predictions += 1;
        sum.thousandths += (thousandths as u64).min(ERROR_MAX);
    }

    /// Of each kind and turn there was.
    pub(in crate::dispatch) fn get(&self) -> Vec<PredictionError> {
        let turns = [Predicted::Run, Predicted::Load, Predicted::Copy];
        let of_kind = |(kind, sums): (usize, &[Sum; 3])| {
            let sums = *sums;
            turns.into_iter().map(move |turn| (kind as u32, turn, sums[turn as usize]))
        };
        let all = self.0.iter().enumerate().flat_map(of_kind).filter(|(.., sum)| sum.predictions > 0);
        let error = |(kind, turn, Sum { predictions, thousandths }): (u32, Predicted, Sum)| PredictionError {
            kind,
            turn,
            predictions,
            thousandths,
        };
        all.map(error).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_apart_by_kind_and_by_what_there_was_to_do() {
        let mut errors = Errors::default();
        let ms = Duration::from_millis;
        errors.add(1, Source::Here, ms(90), ms(100));
        errors.add(1, Source::Here, ms(130), ms(100));
        errors.add(1, Source::SharedHost, ms(50), ms(200));
        errors.add(0, Source::Host, ms(5), Duration::ZERO);
        let error =
            |kind, turn, predictions, thousandths| PredictionError { kind, turn, predictions, thousandths };
        let (run, load) = (Predicted::Run, Predicted::Load);
        let expected = [error(0, load, 1, 10_000), error(1, run, 2, 400), error(1, load, 1, 750)];
        assert_eq!(errors.get(), expected);
    }
}
