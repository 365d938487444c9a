//! Metrics of steps with a deadline, counted at the end of each call. A step keeps its labels, so each
//! series only grows, even as other steps come and go.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use millrace_types::{FunctionKey, FunctionName};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Steps with labels of their own. Further steps share [`OTHER`].
const LABELLED_MAX: usize = 1_000;
const OTHER: &str = "_other";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    tenant: String,
    workflow: String,
    step: String,
}

/// The SLO counts of all steps.
#[derive(Debug, Default)]
pub(super) struct StepSloMetrics {
    requests: Family<Labels, Counter>,
    in_time: Family<Labels, Counter>,
    /// The steps with labels of their own.
    labelled: Mutex<BTreeSet<(FunctionKey, FunctionName)>>,
}

/// The SLO counts of one step, or of all steps beyond the bound.
#[derive(Debug)]
pub(super) struct StepSloCounter {
    requests: Counter,
    in_time: Counter,
}

impl StepSloCounter {
    /// Counts a call.
    pub(super) fn count(&self, in_time: bool) {
        self.requests.inc();
        if in_time {
            self.in_time.inc();
        }
    }
}

impl StepSloMetrics {
    /// Registers the metrics of all steps.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "millrace_workflow_step_slo_requests",
            "Calls of a step that count towards its deadline",
            self.requests.clone(),
        );
        registry.register(
            "millrace_workflow_step_slo_in_time",
            "Calls of a step answered within its deadline",
            self.in_time.clone(),
        );
    }

    /// Returns the counts of a step. The step gets its own labels if the labels exist already or some
    /// are left.
    pub(super) fn of(&self, workflow: &FunctionKey, step: &FunctionName) -> StepSloCounter {
        let mut labelled = self.labelled.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (workflow.clone(), step.clone());
        let own = labelled.contains(&key) || (labelled.len() < LABELLED_MAX && labelled.insert(key));
        let labels = match own {
            true => labels(workflow, step),
            false => Labels { tenant: OTHER.to_owned(), workflow: OTHER.to_owned(), step: OTHER.to_owned() },
        };
        StepSloCounter {
            requests: self.requests.get_or_create_owned(&labels),
            in_time: self.in_time.get_or_create_owned(&labels),
        }
    }

    /// If no labels are left, frees the labels and drops the counts of deleted steps.
    pub(super) fn make_room(&self, still_there: impl Fn(&FunctionKey, &FunctionName) -> bool) {
        let mut labelled = self.labelled.lock().unwrap_or_else(PoisonError::into_inner);
        if labelled.len() < LABELLED_MAX {
            return;
        }
        labelled.retain(|(workflow, step)| {
            let stays = still_there(workflow, step);
            if !stays {
                let labels = labels(workflow, step);
                self.requests.remove(&labels);
                self.in_time.remove(&labels);
            }
            stays
        });
    }
}

fn labels(workflow: &FunctionKey, step: &FunctionName) -> Labels {
    Labels {
        tenant: workflow.tenant.to_string(),
        workflow: workflow.name.to_string(),
        step: step.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::TenantName;
    use prometheus_client::encoding::text::encode;

    use super::*;

    fn name(name: &str) -> FunctionName {
        FunctionName::new(name).unwrap()
    }

    fn workflow(of: &str) -> FunctionKey {
        FunctionKey { tenant: TenantName::default(), name: name(of) }
    }

    fn shown() -> (StepSloMetrics, Registry) {
        let scores = StepSloMetrics::default();
        let mut registry = Registry::default();
        scores.register(&mut registry);
        (scores, registry)
    }

    /// Returns every series with the value.
    fn series(registry: &Registry) -> BTreeSet<String> {
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    #[test]
    fn a_step_keeps_its_series_when_other_steps_exceed_the_bound() {
        let (scores, registry) = shown();
        let count = |step: &str| scores.of(&workflow("w"), &name(step)).count(true);
        (0..=LABELLED_MAX).for_each(|at| count(&format!("s{at:04}")));
        let before = series(&registry);
        assert_eq!(before.len(), 2 * (LABELLED_MAX + 1));
        // "a" sorts before all other steps.
        count("a");
        count("s0000");
        let after = series(&registry);
        let line = |counter: &str, labels: &str, value: u64| {
            format!("millrace_workflow_step_slo_{counter}_total{{{labels}}} {value}")
        };
        let other = r#"tenant="_other",workflow="_other",step="_other""#;
        let first = r#"tenant="default",workflow="w",step="s0000""#;
        let changed = [("in_time", other), ("in_time", first), ("requests", other), ("requests", first)];
        let changed = changed.map(|(counter, labels)| line(counter, labels, 2));
        assert_eq!(after.difference(&before).cloned().collect::<Vec<_>>(), changed);
    }

    #[test]
    fn deleted_steps_free_their_labels_for_other_steps() {
        let (scores, registry) = shown();
        let count = |of: &str, step: &str| scores.of(&workflow(of), &name(step)).count(true);
        (0..LABELLED_MAX).for_each(|at| count("gone", &format!("s{at:04}")));
        scores.make_room(|_, _| true);
        count("w", "late");
        scores.make_room(|of, _| *of != workflow("gone"));
        count("w", "later");
        let series = series(&registry);
        let has = |text: &str| series.iter().any(|line| line.contains(text));
        assert!(has(r#"step="later""#) && has(r#"step="_other""#), "{series:?}");
        assert!(!has(r#"step="late""#) && !has(r#"workflow="gone""#), "{series:?}");
    }
}
