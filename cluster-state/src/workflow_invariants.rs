//! The invariants of workflows. Each workflow is checked against the stored records of the
//! functions and workflows that it runs, and those records are checked in the same way. No workflow
//! runs itself through others, because each has a greater nesting than its inner workflows.

use millrace_types::workflow::RunnableSignature;

use crate::invariants::InvariantViolation;
use crate::record::WorkflowRecord;
use crate::state::State;
use crate::workflows::ChangedFits;

impl State {
    /// Checks every workflow, in time proportional to the number of workflows and steps.
    pub(crate) fn check_workflows(&self) -> Result<(), InvariantViolation> {
        for (key, workflow) in &self.workflows {
            if *key != workflow.key || *key != workflow.spec.key {
                return Err(InvariantViolation::Misfiled(format!("workflow {}", workflow.key)));
            }
            if self.functions.contains_key(key) {
                return Err(InvariantViolation::NamedTwice(key.clone()));
            }
            if self.retired.get(key).is_some_and(|retired| retired.last >= workflow.generation) {
                return Err(InvariantViolation::Generation(key.clone()));
            }
            if workflow.created_at > workflow.updated_at || workflow.updated_at > self.clock {
                return Err(InvariantViolation::Future(format!("workflow {key}")));
            }
            self.check_fit(workflow)?;
        }
        Ok(())
    }

    fn check_fit(&self, workflow: &WorkflowRecord) -> Result<(), InvariantViolation> {
        let key = &workflow.key;
        if workflow.spec.validate().is_err() {
            return Err(InvariantViolation::Spec(key.clone()));
        }
        let fresh = self.fit(&workflow.spec, &ChangedFits::new());
        let fresh = fresh.map_err(|unfit| InvariantViolation::Unfit(key.clone(), unfit))?;
        if fresh == RunnableSignature::from(workflow) {
            Ok(())
        } else {
            Err(InvariantViolation::Signature(key.clone()))
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::Revision;
    use millrace_types::workflow::{CheckError, CompositionError};

    use super::*;
    use crate::commands::testing::{TestLog, apply, apply_workflow, chain, key, run_function, run_workflow};
    use crate::state::RetiredName;

    #[test]
    fn each_broken_invariant_of_workflows_is_found() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.apply(apply("f", "m1")).unwrap();
        log.apply(apply_workflow(chain("w", &[run_function("f")]))).unwrap();
        log.apply(apply_workflow(chain("v", &[run_workflow("w")]))).unwrap();
        let good = log.state;
        good.check_invariants().unwrap();
        let step = good.workflow(&key("w")).unwrap().spec.steps[0].name.clone();
        let unknown = CheckError::UnknownRun { step, run: run_function("f") };
        let changed = |name: &str, change: &dyn Fn(&mut WorkflowRecord)| {
            let mut state = good.clone();
            state.workflows.change(&key(name), change);
            state.check_workflows()
        };

        let signature = |name: &str| Err(InvariantViolation::Signature(key(name)));
        // Workflow `v` runs `w`, and is checked first, because of its name.
        let above = changed("w", &|it| it.signature.outputs.clear());
        assert!(
            matches!(&above, Err(InvariantViolation::Unfit(of, CompositionError::Check(_))) if *of == key("v")),
            "{above:?}"
        );
        assert_eq!(changed("v", &|it| it.signature.outputs.clear()), signature("v"));
        assert_eq!(changed("v", &|it| it.nesting = 0), signature("v"));
        assert_eq!(changed("w", &|it| it.spec.steps.clear()), Err(InvariantViolation::Spec(key("w"))));
        // Two workflows that run each other cannot both have the greater nesting.
        let looped = changed("w", &|it| it.spec.steps[0].run = run_workflow("v"));
        assert!(matches!(looped, Err(InvariantViolation::Signature(_))), "{looped:?}");

        let mut gone = good.clone();
        gone.functions.remove(&key("f"));
        let unfit = InvariantViolation::Unfit(key("w"), CompositionError::Check(unknown.into()));
        assert_eq!(gone.check_workflows(), Err(unfit));

        let mut twice = good.clone();
        let function = good.functions.get(&key("f")).cloned().unwrap();
        twice.functions.insert(key("w"), function);
        assert_eq!(twice.check_workflows(), Err(InvariantViolation::NamedTwice(key("w"))));

        let mut early = good.clone();
        early.retired.insert(key("w"), RetiredName { last: Revision::FIRST, version: 1 });
        assert_eq!(early.check_workflows(), Err(InvariantViolation::Generation(key("w"))));
    }
}
