//! What `/metrics` shows of steps that have a deadline of their own. Counted as their calls end, under
//! labels that a step keeps: what stands under one only grows, whatever else comes and goes.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use millrace_types::{FunctionKey, FunctionName};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::serving::Serving;

/// The most steps with labels of their own; those that come later share [`OTHER`].
const LABELLED_MAX: usize = 1_000;
const OTHER: &str = "_other";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    tenant: String,
    workflow: String,
    step: String,
}

/// Every step's.
#[derive(Debug, Default)]
pub(super) struct Scores {
    requests: Family<Labels, Counter>,
    in_time: Family<Labels, Counter>,
    /// Those that have labels of their own.
    labelled: Mutex<BTreeSet<(FunctionKey, FunctionName)>>,
}

/// One step's, or that of all those beyond the bound.
#[derive(Debug)]
pub(super) struct Score {
    requests: Counter,
    in_time: Counter,
}

impl Score {
    /// Counts a call.
    pub(super) fn count(&self, in_time: bool) {
        self.requests.inc();
        if in_time {
            self.in_time.inc();
        }
    }
}

/// Shows them.
pub(crate) fn register(registry: &mut Registry, serving: &Serving) {
    serving.workflows.scores.register(registry);
}

impl Scores {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "millrace_workflow_step_slo_requests",
            "Calls of a step that count towards its deadline",
            self.requests.clone(),
        );
        registry.register(
            "millrace_workflow_step_slo_in_time",
            "Of those, the ones answered within it",
            self.in_time.clone(),
        );
    }

    /// A step's, under labels of its own if it has any or there are some left.
    pub(super) fn of(&self, workflow: &FunctionKey, step: &FunctionName) -> Score {
        let mut labelled = self.labelled.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (workflow.clone(), step.clone());
        let own = labelled.contains(&key) || (labelled.len() < LABELLED_MAX && labelled.insert(key));
        let labels = match own {
            true => labels(workflow, step),
            false => Labels { tenant: OTHER.to_owned(), workflow: OTHER.to_owned(), step: OTHER.to_owned() },
        };
        Score {
            requests: self.requests.get_or_create_owned(&labels),
            in_time: self.in_time.get_or_create_owned(&labels),
        }
    }

    /// Where no labels are left, frees those of steps that are gone, with what was counted under them.
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

    fn shown() -> (Scores, Registry) {
        let (scores, mut registry) = (Scores::default(), Registry::default());
        scores.register(&mut registry);
        (scores, registry)
    }

    /// Every series with its value.
    fn series(registry: &Registry) -> BTreeSet<String> {
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    #[test]
    fn a_step_keeps_its_series_whoever_comes_after_it() {
        let (scores, registry) = shown();
        let count = |step: &str| scores.of(&workflow("w"), &name(step)).count(true);
        (0..=LABELLED_MAX).for_each(|at| count(&format!("s{at:04}")));
        let before = series(&registry);
        assert_eq!(before.len(), 2 * (LABELLED_MAX + 1));
        // It stands before all of them.
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
    fn steps_that_are_gone_leave_their_labels_to_others() {
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
