//! The call of a nested workflow by a workflow run.

use millrace_types::workflow::NESTING_MAX;
use millrace_types::{Failure, FunctionName, Reason};

use super::ask::{CallOutputs, RequestedOutput, StepCall};
use super::failure::WorkflowRunFailure;
use super::inputs::in_order;
use super::ran::ExecutionRecord;
use super::request::Depth;
use super::run::{RunExpectations, WorkflowRunner};
use super::values::RunTensor;

impl StepCall<'_> {
    /// Runs a nested workflow.
    pub(super) async fn workflow(
        self,
        name: FunctionName,
        inputs: Vec<(String, RunTensor)>,
    ) -> Result<CallOutputs, WorkflowRunFailure> {
        let key = self.key(name);
        if self.depth >= Depth(NESTING_MAX) {
            let message = format!("workflow {key} is nested more than {NESTING_MAX} levels deep");
            return Err(Failure::new(Reason::Internal, message).into());
        }
        let (way, model) = self.serving.workflow(&key)?;
        let missing = || Failure::new(Reason::Internal, format!("an input of workflow {key} is missing"));
        let mut inputs = in_order(&way.plan, inputs).ok_or_else(missing)?;
        // Some inputs may have been ready for longer, but no step inside could begin before the call.
        inputs.iter_mut().for_each(|input| input.made = self.began);
        let names = || model.outputs.iter().map(|output| output.name.clone());
        let answered =
            names().map(|name| self.wanted.contains(&RequestedOutput { name, answered: true })).collect();
        let depth = Depth(self.depth.0 + 1);
        let ran = ExecutionRecord::within(self.ran);
        // Apply the earlier of the workflow's own objective and that of the outer workflow.
        let own = model.objective.map(|slo| self.began.at + slo.deadline);
        let target = own.into_iter().chain(self.target).min();
        let wish = RunExpectations { answered, target, after: self.next };
        let runner = WorkflowRunner::new(self.serving, &key, way, self.request, &ran, depth, wish);
        let answer = runner.run(inputs).await?;
        let outputs = names().zip(answer.outputs).collect();
        Ok(CallOutputs { outputs, attempts: answer.attempts })
    }
}
