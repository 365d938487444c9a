//! Cuts a model's steps into launches, so that the first launch can run while the weights of later
//! launches are still being copied (T08).
//!
//! A launch begins at the first read of new weights, and reads about one group of new weights (T09).
//! Between two steps that read new weights, the position of a cut does not affect when weights are
//! needed. The cut falls where the fewest values are live, because each live value is passed from
//! launch to launch. Among equal positions the last one is taken, so that no step waits for weights
//! that it does not read. In a network of residual blocks, this position is the end of a block, where
//! a single value is live.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::layout::{ALIGNMENT, WeightPlacement};

/// Approximate bytes of new weights per launch: the size beyond which copies get no faster, 2 MB on
/// the hardware of T09.
pub const GROUP_BYTES: u64 = 2 << 20;
/// Most launches of a model; the launches of a large model are larger instead.
pub const MAX_LAUNCHES: usize = 64;

/// The granularity at which a model is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grouping {
    /// Approximate bytes of new weights per launch.
    pub bytes: u64,
    /// Most launches; a larger model gets larger groups instead.
    pub launches_max: NonZeroUsize,
}

impl Grouping {
    /// A launch for every step that reads new weights: the baseline in comparisons with groups (T08).
    pub const PER_PARAMETER: Self = Self { bytes: 1, launches_max: NonZeroUsize::MAX };

    /// Returns the group size in bytes for a model with `total` bytes of weights. Each launch except
    /// the last reads at least half a group.
    fn target(self, total: u64) -> u64 {
        let launches_max = u64::try_from(self.launches_max.get()).unwrap_or(u64::MAX);
        self.bytes.max(total.div_ceil((launches_max / 2).max(1)))
    }
}

impl Default for Grouping {
    fn default() -> Self {
        let launches_max = NonZeroUsize::new(MAX_LAUNCHES).unwrap_or(NonZeroUsize::MIN);
        Self { bytes: GROUP_BYTES, launches_max }
    }
}

/// A part of a model that can run as soon as its own weights are loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Values of this launch that later launches read or that are outputs of the model. At least one.
    pub writes: Vec<String>,
    /// Inputs of the model and values of earlier launches that this launch reads.
    pub args: Vec<String>,
    /// Byte ranges of the weights' region that this launch reads, in order; the ranges neither touch
    /// nor overlap. Weights that an earlier launch also reads are included.
    pub reads: Vec<Range<u64>>,
}

/// A node in the form that cutting needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GraphStep {
    /// Values that the node reads, without constants.
    pub(crate) reads: Vec<String>,
    /// Values that the node writes.
    pub(crate) makes: Vec<String>,
    /// Indices of the placed weights that the node reads.
    pub(crate) weights: Vec<usize>,
}

/// Cuts `steps`, which are in the order of execution, into launches. `outputs` are the outputs of the
/// model. The last launch writes the outputs that no step makes.
pub(crate) fn launches(
    steps: &[GraphStep],
    outputs: &[String],
    placements: &[WeightPlacement],
    grouping: Grouping,
) -> Vec<Launch> {
    let total: u64 = placements.iter().map(|weight| weight.bytes).sum();
    let cuts = choose_cuts(&candidates(steps, placements), total, grouping.target(total));
    let mut bounds = vec![0];
    bounds.extend(cuts);
    bounds.push(steps.len());
    let values = ValueLifetimes::of(steps, outputs);
    bounds.windows(2).map(|bound| values.launch(bound[0]..bound[1], placements)).collect()
}

/// A possible cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CutCandidate {
    /// Number of steps before the cut.
    at: usize,
    /// Number of values that are made before the cut and read after it.
    live: usize,
    /// Bytes of weights that are first read before the cut.
    loaded: u64,
}

/// Returns the best cut between each two steps that read new weights.
fn candidates(steps: &[GraphStep], placements: &[WeightPlacement]) -> Vec<CutCandidate> {
    let live = live_values(steps);
    let mut met = HashSet::new();
    let mut loaded = 0;
    let mut best: Option<CutCandidate> = None;
    let mut candidates = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let new = step.weights.iter().filter(|&&weight| met.insert(weight));
        let new: u64 = new.map(|&weight| placements[weight].bytes).sum();
        if new > 0 {
            candidates.extend(best.take());
            loaded += new;
        }
        let here = CutCandidate { at: index + 1, live: live[index], loaded };
        if loaded > 0 && best.is_none_or(|best| here.live <= best.live) {
            best = Some(here);
        }
    }
    candidates
}

/// Returns the number of live values after each step: values that this or an earlier step made and a
/// later step reads.
fn live_values(steps: &[GraphStep]) -> Vec<usize> {
    let mut made_at = HashMap::new();
    let mut read_last = HashMap::new();
    for (index, step) in steps.iter().enumerate() {
        made_at.extend(step.makes.iter().map(|value| (value.as_str(), index)));
        read_last.extend(step.reads.iter().map(|value| (value.as_str(), index)));
    }
    // `change` has the difference at each step; the running sum follows below.
    let mut change = vec![0isize; steps.len() + 1];
    for (value, made) in made_at {
        if let Some(&last) = read_last.get(value) {
            change[made] += 1;
            change[last] -= 1;
        }
    }
    let running = change.iter().take(steps.len()).scan(0isize, |live, change| {
        *live += change;
        Some(live.unsigned_abs())
    });
    running.collect()
}

/// Picks cuts such that each launch reads between `target / 2` and `2 * target` bytes of new weights,
/// if the sizes of single weights allow that. Among the cuts in that window, the one with the fewest
/// live values wins, then the one nearest to `target`. A remainder of up to `target` stays whole, and
/// a remainder below `target / 2` joins the previous launch.
fn choose_cuts(candidates: &[CutCandidate], total: u64, target: u64) -> Vec<usize> {
    let mut cuts = Vec::new();
    let mut rest = candidates;
    let mut start = 0;
    while total - start > target {
        let eligible =
            |cut: &CutCandidate| cut.loaded - start >= target / 2 && total - cut.loaded >= target / 2;
        let Some(first) = rest.iter().position(eligible) else { return cuts };
        let window = rest[first..].iter().take_while(|cut| {
            (cut.loaded - start <= 2 * target || cut.at == rest[first].at) && eligible(cut)
        });
        let cost = |cut: &CutCandidate| (cut.live, (cut.loaded - start).abs_diff(target));
        let Some((offset, cut)) = window.enumerate().min_by_key(|(_, cut)| cost(cut)) else { return cuts };
        cuts.push(cut.at);
        start = cut.loaded;
        rest = &rest[first + offset + 1..];
    }
    cuts
}

/// Index of the step that makes each value, and of the last step that reads it.
struct ValueLifetimes<'a> {
    steps: &'a [GraphStep],
    outputs: HashSet<&'a str>,
    made_at: HashMap<&'a str, usize>,
    read_last: HashMap<&'a str, usize>,
    /// Outputs that no step makes: inputs and weights that are passed through.
    passed_through: Vec<&'a str>,
}

impl<'a> ValueLifetimes<'a> {
    fn of(steps: &'a [GraphStep], outputs: &'a [String]) -> Self {
        let mut made_at = HashMap::new();
        let mut read_last = HashMap::new();
        for (index, step) in steps.iter().enumerate() {
            made_at.extend(step.makes.iter().map(|value| (value.as_str(), index)));
            read_last.extend(step.reads.iter().map(|value| (value.as_str(), index)));
        }
        let passed_through = outputs.iter().map(String::as_str).filter(|value| !made_at.contains_key(value));
        let passed_through = passed_through.collect();
        Self {
            steps,
            outputs: outputs.iter().map(String::as_str).collect(),
            made_at,
            read_last,
            passed_through,
        }
    }

    fn launch(&self, range: Range<usize>, placements: &[WeightPlacement]) -> Launch {
        let steps = &self.steps[range.clone()];
        let leaves = |value: &&String| {
            let value = value.as_str();
            self.outputs.contains(value) || self.read_last.get(value).is_some_and(|&last| last >= range.end)
        };
        let mut writes: Vec<String> =
            steps.iter().flat_map(|step| &step.makes).filter(leaves).cloned().collect();
        let comes_in =
            |value: &&String| self.made_at.get(value.as_str()).is_none_or(|&made| made < range.start);
        let mut args: Vec<String> =
            steps.iter().flat_map(|step| &step.reads).filter(comes_in).cloned().collect();
        if range.end == self.steps.len() {
            writes.extend(self.passed_through.iter().map(ToString::to_string));
        }
        let mut seen = HashSet::new();
        args.retain(|value| seen.insert(value.clone()));
        let weights = steps.iter().flat_map(|step| &step.weights).map(|&weight| {
            let WeightPlacement { offset, bytes, .. } = placements[weight];
            offset..offset + bytes
        });
        Launch { writes, args, reads: coalesce(weights.collect()) }
    }
}

/// Sorts ranges, and joins ranges that only padding separates.
fn coalesce(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.next_multiple_of(ALIGNMENT) => {
                last.end = last.end.max(range.end)
            }
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::WeightSource;

    const MIB: u64 = 1 << 20;

    fn placements(mib: &[u64]) -> Vec<WeightPlacement> {
        let starts = mib.iter().scan(0, |end, size| {
            *end += size * MIB;
            Some(*end - size * MIB)
        });
        let place = |(offset, size): (u64, &u64)| WeightPlacement {
            name: format!("w{offset}"),
            offset,
            bytes: size * MIB,
            source: WeightSource::File(0..0),
        };
        starts.zip(mib).map(place).collect()
    }

    /// Parses `"a,b>c:0"`: a step that reads `a` and `b`, makes `c` and uses weight 0.
    fn step(text: &str) -> GraphStep {
        let (reads, rest) = text.split_once('>').unwrap();
        let (makes, weights) = rest.split_once(':').unwrap();
        let list = |text: &str| text.split(',').filter(|part| !part.is_empty()).map(String::from).collect();
        let numbers = weights.split(',').filter(|part| !part.is_empty());
        GraphStep {
            reads: list(reads),
            makes: list(makes),
            weights: numbers.map(|n| n.parse().unwrap()).collect(),
        }
    }

    fn cut(steps: &[&str], outputs: &[&str], mib: &[u64]) -> Vec<Launch> {
        let steps: Vec<GraphStep> = steps.iter().map(|text| step(text)).collect();
        let outputs: Vec<String> = outputs.iter().map(ToString::to_string).collect();
        launches(&steps, &outputs, &placements(mib), Grouping::default())
    }

    #[test]
    fn per_parameter_grouping_makes_a_launch_of_each_step_with_new_weights() {
        let steps: Vec<GraphStep> = ["x>a:0", "a>b:", "b>c:1,2", "c>d:0", "d>y:3"].map(step).into();
        let sizes = [1; 4];
        let cut = launches(&steps, &["y".to_owned()], &placements(&sizes), Grouping::PER_PARAMETER);
        let reads: Vec<_> = cut.iter().map(|launch| launch.reads.clone()).collect();
        assert_eq!(reads[0], std::slice::from_ref(&(0..MIB)));
        assert_eq!(reads.len(), 3, "{cut:?}");
        assert_eq!(reads[2].last(), Some(&(3 * MIB..4 * MIB)));
    }

    #[test]
    fn a_bound_on_launches_makes_groups_grow() {
        let texts: Vec<String> = (0..40).map(|i| format!("v{i}>v{}:{i}", i + 1)).collect();
        let steps: Vec<GraphStep> = texts.iter().map(|text| step(text)).collect();
        for max in [1, 2, 5, 16] {
            let launches_max = NonZeroUsize::new(max).unwrap();
            let grouping = Grouping { bytes: 1, launches_max };
            let cut = launches(&steps, &["v40".to_owned()], &placements(&[1; 40]), grouping);
            assert!(cut.len() <= max, "{} launches of at most {max}", cut.len());
        }
    }

    /// Returns a launch that reads a single range of whole MiB, or nothing.
    fn launch(writes: &[&str], args: &[&str], reads: Range<u64>) -> Launch {
        let strings = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let reads = Some(reads.start * MIB..reads.end * MIB).filter(|reads| !reads.is_empty());
        Launch { writes: strings(writes), args: strings(args), reads: reads.into_iter().collect() }
    }

    #[test]
    fn cuts_at_the_end_of_a_residual_block_where_one_value_is_live() {
        // Two blocks: a = f(x), b = g(a), c = b + x; and the same again from c.
        let steps = ["x>a:0", "a>b:1", "b,x>c:", "c>d:2", "d>e:3", "e,c>y:"];
        assert_eq!(
            cut(&steps, &["y"], &[1, 1, 1, 1]),
            [launch(&["c"], &["x"], 0..2), launch(&["y"], &["c"], 2..4)]
        );
    }

    #[test]
    fn a_small_model_is_one_launch() {
        assert_eq!(cut(&["x>h:0", "h>y:1"], &["y"], &[1, 1]), [launch(&["y"], &["x"], 0..2)]);
        assert_eq!(cut(&["x>y:"], &["y"], &[]), [launch(&["y"], &["x"], 0..0)]);
    }

    #[test]
    fn work_that_needs_no_new_weights_runs_before_the_cut() {
        let steps = ["x>a:0", "a>b:", "b>c:", "c>y:1"];
        assert_eq!(
            cut(&steps, &["y"], &[2, 2]),
            [launch(&["c"], &["x"], 0..2), launch(&["y"], &["c"], 2..4)]
        );
    }

    #[test]
    fn outputs_and_values_that_skip_a_launch_are_written_where_they_are_made() {
        let steps = ["x>early:0", "early>b:1", "b,early,x>y:2"];
        assert_eq!(
            cut(&steps, &["y", "b"], &[2, 2, 2]),
            [
                launch(&["early"], &["x"], 0..2),
                launch(&["b"], &["early"], 2..4),
                launch(&["y"], &["b", "early", "x"], 4..6),
            ]
        );
    }

    #[test]
    fn a_shared_weight_is_read_by_both_launches() {
        let steps = ["x>a:0", "a>b:1", "b>y:0,2"];
        let launches = cut(&steps, &["y"], &[2, 2, 2]);
        assert_eq!(launches.last().unwrap().reads, [0..2 * MIB, 4 * MIB..6 * MIB]);
    }

    #[test]
    fn an_output_without_a_maker_is_written_by_the_last_launch() {
        let last = cut(&["x>y:0", "y>z:1"], &["z", "x"], &[2, 2]).pop().unwrap();
        assert_eq!(last.writes, ["z", "x"]);
    }

    #[test]
    fn a_weight_larger_than_a_group_gets_a_launch_of_its_own_size() {
        let sizes: Vec<usize> =
            cut(&["x>a:0", "a>b:1", "b>y:2"], &["y"], &[2, 50, 2]).iter().map(|l| l.reads.len()).collect();
        assert_eq!(sizes, [1, 1, 1]);
    }
}
