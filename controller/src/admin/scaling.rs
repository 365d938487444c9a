//! The number of nodes that the cluster needs. Any controller answers, because each plans.

use millrace_nodes::scaling::{NodeNeedReason as Why, ScalingSignal};
use millrace_proto::admin as api;
use millrace_types::{Failure, Reason};

use super::AdminService;

impl AdminService {
    pub(super) fn scaling_signal(&self) -> Result<api::ScalingSignal, Failure> {
        let signal = self.outlook.signal().ok_or_else(|| {
            Failure::new(Reason::NoLeader, "this controller has not planned yet: ask again in a moment")
        })?;
        Ok(shown(&signal))
    }
}

fn shown(signal: &ScalingSignal) -> api::ScalingSignal {
    let reason = |why: &Why| api::ScalingReason { reason: why.name().to_owned(), message: why.to_string() };
    api::ScalingSignal {
        nodes_needed: signal.nodes_needed,
        nodes_now: signal.nodes_now,
        reasons: signal.reasons.iter().map(reason).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_has_the_reasons_for_its_number() {
        let reasons = vec![Why::Replicas { replicas: 3 }, Why::Slo { functions: 2 }];
        let said = |reason: &str, message: &str| api::ScalingReason {
            reason: reason.into(),
            message: message.into(),
        };
        let expected = api::ScalingSignal {
            nodes_needed: 3,
            nodes_now: 2,
            reasons: vec![
                said("Replicas", "a function asks for 3 replicas, each on a node of its own"),
                said("Slo", "2 functions miss their objective, and GPUs are busy"),
            ],
        };
        assert_eq!(shown(&ScalingSignal { nodes_needed: 3, nodes_now: 2, reasons }), expected);
    }
}
