//! A program's launches with numbered values, so that a run moves values between slots without name
//! lookups. Pure code.

use std::collections::HashMap;
use std::ops::Range;

use millrace_device::RangeSet;
use millrace_engine::KernelSpec;

/// Index at which a run stores a value.
pub(crate) type Slot = usize;

/// The execution plan of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LaunchPlan {
    /// The whole model as a single launch, for runs with all weights loaded.
    pub(crate) whole: PlannedLaunch,
    /// Launches of the model, in order.
    pub(crate) steps: Vec<PlannedLaunch>,
    /// Number of slots of a run. The first slots are the inputs, in order.
    pub(crate) slots: usize,
    /// Slots of the outputs, in order.
    pub(crate) outputs: Vec<Slot>,
}

/// A launch of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedLaunch {
    /// Names and reads of the launch, in the form that the engine takes.
    pub(crate) spec: KernelSpec,
    /// Slots of the input values.
    pub(crate) args: Vec<SlotArg>,
    /// Slots of the output values.
    pub(crate) writes: Vec<Slot>,
}

/// An input value of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotArg {
    pub(crate) slot: Slot,
    /// Whether no later launch reads the value, so the launch may reuse the memory.
    pub(crate) last: bool,
}

/// Reason why launches are inconsistent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("launch {launch} reads {value:?}, which is neither an input nor an output of an earlier launch")]
    NotMade { launch: usize, value: String },
    #[error("output {0:?} is neither an input nor an output of a launch")]
    NoSuchOutput(String),
    #[error("input {0:?} is declared twice")]
    InputTwice(String),
}

impl LaunchPlan {
    /// Numbers the values of these launches.
    ///
    /// # Errors
    /// Returns an [`Error`] for the first value that no launch makes.
    pub(crate) fn new(
        inputs: &[String],
        outputs: &[String],
        launches: Vec<KernelSpec>,
    ) -> Result<Self, Error> {
        let mut slots = HashMap::new();
        for (slot, input) in inputs.iter().enumerate() {
            if slots.insert(input.clone(), slot).is_some() {
                return Err(Error::InputTwice(input.clone()));
            }
        }
        let whole = PlannedLaunch {
            spec: KernelSpec { args: inputs.to_vec(), writes: outputs.to_vec(), reads: union(&launches) },
            args: (0..inputs.len()).map(|slot| SlotArg { slot, last: true }).collect(),
            writes: (0..outputs.len()).collect(),
        };
        let mut steps = Vec::with_capacity(launches.len());
        for (launch, spec) in launches.into_iter().enumerate() {
            let arg = |value: &String| match slots.get(value) {
                Some(&slot) => Ok(SlotArg { slot, last: false }),
                None => Err(Error::NotMade { launch, value: value.clone() }),
            };
            let args = spec.args.iter().map(arg).collect::<Result<_, _>>()?;
            let mut write = |value: &String| {
                let next = slots.len();
                *slots.entry(value.clone()).or_insert(next)
            };
            let writes = spec.writes.iter().map(&mut write).collect();
            steps.push(PlannedLaunch { spec, args, writes });
        }
        let output =
            |name: &String| slots.get(name).copied().ok_or_else(|| Error::NoSuchOutput(name.clone()));
        let outputs = outputs.iter().map(output).collect::<Result<Vec<_>, _>>()?;
        mark_last(&mut steps, &outputs, slots.len());
        Ok(Self { whole, steps, slots: slots.len(), outputs })
    }
}

/// Returns all bytes that any launch reads.
fn union(launches: &[KernelSpec]) -> Vec<Range<u64>> {
    let mut reads = RangeSet::default();
    launches.iter().flat_map(|launch| &launch.reads).for_each(|range| reads.insert(range.clone()));
    reads.iter().collect()
}

/// Marks the last reader of each value. An output has no last reader, because the run reads it at the end.
fn mark_last(steps: &mut [PlannedLaunch], outputs: &[Slot], slots: usize) {
    let mut read_later = vec![false; slots];
    outputs.iter().for_each(|&slot| read_later[slot] = true);
    for arg in steps.iter_mut().rev().flat_map(|step| step.args.iter_mut().rev()) {
        arg.last = !std::mem::replace(&mut read_later[arg.slot], true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn launch(args: &[&str], writes: &[&str], reads: &[Range<u64>]) -> KernelSpec {
        KernelSpec { args: names(args), writes: names(writes), reads: reads.to_vec() }
    }

    fn plan(inputs: &[&str], outputs: &[&str], launches: Vec<KernelSpec>) -> Result<LaunchPlan, Error> {
        LaunchPlan::new(&names(inputs), &names(outputs), launches)
    }

    fn arg(slot: Slot, last: bool) -> SlotArg {
        SlotArg { slot, last }
    }

    #[test]
    fn values_are_lent_until_their_last_reader_and_outputs_always() {
        let first = launch(&["x"], &["a", "out"], &[]);
        let second = launch(&["a", "x"], &["b"], &[]);
        let third = launch(&["b", "a", "out"], &["end"], &[]);
        let plan = plan(&["x"], &["out", "end"], vec![first, second, third]).unwrap();
        let args: Vec<_> = plan.steps.iter().map(|step| step.args.clone()).collect();
        assert_eq!(args[0], [arg(0, false)]);
        assert_eq!(args[1], [arg(1, false), arg(0, true)]);
        assert_eq!(args[2], [arg(3, true), arg(1, true), arg(2, false)]);
        assert_eq!((plan.outputs, plan.slots), (vec![2, 4], 5));
    }

    #[test]
    fn the_whole_model_reads_the_union_of_all_launches() {
        let reads = [launch(&["x"], &["a"], &[0..10, 64..70]), launch(&["a"], &["y"], &[10..20, 66..80])];
        let whole = plan(&["x"], &["y"], reads.into()).unwrap().whole;
        assert_eq!(whole.spec, launch(&["x"], &["y"], &[0..20, 64..80]));
        assert_eq!((whole.args, whole.writes), (vec![arg(0, true)], vec![0]));
    }

    #[test]
    fn an_input_may_be_an_output_and_be_written_again() {
        let plan = plan(&["x"], &["x"], vec![launch(&["x"], &["x"], &[])]).unwrap();
        assert_eq!((plan.steps[0].writes.clone(), plan.outputs), (vec![0], vec![0]));
        assert_eq!(plan.steps[0].args, [arg(0, false)]);
    }

    #[test]
    fn values_without_a_maker_are_refused() {
        let not_made = Error::NotMade { launch: 1, value: "c".to_owned() };
        let launches = vec![launch(&["x"], &["a"], &[]), launch(&["c"], &["b"], &[])];
        assert_eq!(plan(&["x"], &["b"], launches), Err(not_made));
        assert_eq!(plan(&[], &["y"], vec![]), Err(Error::NoSuchOutput("y".to_owned())));
        assert_eq!(plan(&["x", "x"], &[], vec![]), Err(Error::InputTwice("x".to_owned())));
    }
}
