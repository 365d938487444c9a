//! What `/metrics` shows of steps that have a deadline of their own.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use millrace_policy::workflow::StepIndex;
use millrace_types::SloCounts;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Registry;

use super::{Way, Workflows};
use crate::serving::Serving;

/// The most steps with labels of their own, the first by name; those beyond share [`OTHER`].
const LABELLED_MAX: usize = 1_000;
const OTHER: &str = "_other";

type Count = fn(&SloCounts) -> u64;
/// Tenant, workflow, step.
type Labels = [(&'static str, String); 3];

#[derive(Debug)]
struct Scores(Arc<Serving>);

/// Shows them.
pub(crate) fn register(registry: &mut Registry, serving: Arc<Serving>) {
    registry.register_collector(Box::new(Scores(serving)));
}

impl Workflows {
    /// Of every step that has a deadline, by tenant, workflow and step.
    fn scores(&self) -> Vec<(Labels, SloCounts)> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let mut scores = BTreeMap::new();
        for (key, entry) in entries.iter() {
            let Ok(Way { plan, paces }) = &entry.way else { continue };
            let steps = plan.steps().iter().enumerate().filter(|(_, step)| step.deadline.is_some());
            for (at, step) in steps {
                let name = (key.tenant.to_string(), key.name.to_string(), step.name.to_string());
                scores.insert(name, paces.score(StepIndex(at)));
            }
        }
        let (mut told, mut other) = (Vec::new(), SloCounts::default());
        let beyond = scores.len() > LABELLED_MAX;
        for (place, ((tenant, workflow, step), score)) in scores.into_iter().enumerate() {
            match place < LABELLED_MAX {
                true => told.push((labels(tenant, workflow, step), score)),
                false => other = other.plus(score),
            }
        }
        if beyond {
            told.push((labels(OTHER.to_owned(), OTHER.to_owned(), OTHER.to_owned()), other));
        }
        told
    }
}

fn labels(tenant: String, workflow: String, step: String) -> Labels {
    [("tenant", tenant), ("workflow", workflow), ("step", step)]
}

impl Collector for Scores {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let scores = self.0.workflows.scores();
        let counts: [(_, _, Count); 2] = [
            (
                "millrace_workflow_step_slo_requests",
                "Calls of a step that count towards its deadline",
                |it| it.n,
            ),
            ("millrace_workflow_step_slo_in_time", "Of those, the ones answered within it", |it| it.m),
        ];
        for (name, help, count) in counts {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (labels, score) in &scores {
                ConstCounter::new(count(score)).encode(family.encode_family(labels)?)?;
            }
        }
        Ok(())
    }
}
