//! Prediction errors of the cost model: for each turn, the time predicted at assignment against the
//! actual time.

use std::time::Duration;

use super::SwapSource;
use super::estimate::nanos;

/// Work of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TurnKind {
    /// Run; the model was resident.
    Run,
    /// Load the model from the host, and run.
    Load,
    /// Copy the model from another GPU, and run.
    Copy,
}

impl TurnKind {
    /// Returns the name of the kind of turn, as in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Load => "load",
            Self::Copy => "copy",
        }
    }
}

/// Error of the predictions for a kind of turn on a kind of GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PredictionError {
    /// Type of the GPUs, a [`GpuConfig::kind`](crate::dispatch::GpuConfig::kind).
    pub kind: u32,
    pub turn: TurnKind,
    /// Number of predictions.
    pub predictions: u64,
    /// Sum of the errors, in thousandths of the actual times.
    pub thousandths: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    predictions: u64,
    /// Sum of the errors, in thousandths of the actual times.
    thousandths: u64,
}

/// Sums by kind of GPU and by [`TurnKind`].
#[derive(Debug, Default)]
pub(in crate::dispatch) struct PredictionErrors(Vec<[Sum; 3]>);

/// Maximum error of a prediction, in thousandths of the actual time: a turn of almost no time
/// would otherwise dominate the sum.
const ERROR_MAX: u64 = 10_000;

impl PredictionErrors {
    pub(in crate::dispatch) fn add(
        &mut self,
        kind: u32,
        source: SwapSource,
        predicted: Duration,
        came: Duration,
    ) {
        let kind = kind as usize;
        if self.0.len() <= kind {
            self.0.resize(kind + 1, Default::default());
        }
        let turn = match source {
            SwapSource::Here => TurnKind::Run,
            SwapSource::Host | SwapSource::SharedHost => TurnKind::Load,
            SwapSource::Peer(_) => TurnKind::Copy,
        };
        let off = nanos(predicted).abs_diff(nanos(came));
        let thousandths = u128::from(off) * 1000 / u128::from(nanos(came).max(1));
        let sum = &mut self.0[kind][turn as usize];
        sum.predictions += 1;
        sum.thousandths += (thousandths as u64).min(ERROR_MAX);
    }

    /// Returns the errors for each kind of GPU and turn that occurred.
    pub(in crate::dispatch) fn get(&self) -> Vec<PredictionError> {
        let turns = [TurnKind::Run, TurnKind::Load, TurnKind::Copy];
        let of_kind = |(kind, sums): (usize, &[Sum; 3])| {
            let sums = *sums;
            turns.into_iter().map(move |turn| (kind as u32, turn, sums[turn as usize]))
        };
        let all = self.0.iter().enumerate().flat_map(of_kind).filter(|(.., sum)| sum.predictions > 0);
        let error = |(kind, turn, Sum { predictions, thousandths }): (u32, TurnKind, Sum)| PredictionError {
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
    fn errors_are_summed_by_kind_of_gpu_and_kind_of_turn() {
        let mut errors = PredictionErrors::default();
        let ms = Duration::from_millis;
        errors.add(1, SwapSource::Here, ms(90), ms(100));
        errors.add(1, SwapSource::Here, ms(130), ms(100));
        errors.add(1, SwapSource::SharedHost, ms(50), ms(200));
        errors.add(0, SwapSource::Host, ms(5), Duration::ZERO);
        let error =
            |kind, turn, predictions, thousandths| PredictionError { kind, turn, predictions, thousandths };
        let run = TurnKind::Run;
        let load = TurnKind::Load;
        let expected = [error(0, load, 1, 10_000), error(1, run, 2, 400), error(1, load, 1, 750)];
        assert_eq!(errors.get(), expected);
    }
}
