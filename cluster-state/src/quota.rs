//! The bounds of the state (not tenants' caps, which the command `SetQuota` sets): how many bytes the state
//! takes, and whether a write keeps to the bounds of [`millrace_types::limits`]. In: a state, and a proposal. Out: a [`CommandRefusal`], or nothing.
//!
//! ```text
//!   propose()            leader                          every replica
//!   ─ check_sizes ──▶  ─ State::admit ──▶  the log  ──▶  check_sizes, then the command, then
//!                        on a copy of the                check_definition_capacity: a definition
//!                        state                           that does not fit is taken back
//! ```
//!
//! Each table of the state counts its own bytes ([`crate::table`]). All other records have a
//! bounded size, so their number bounds their bytes. A command that deletes or ends something
//! always passes.

use millrace_types::limits::{
    CALLER_BYTES_MAX, CHECKPOINTS_BYTES_MAX, DEFINITIONS_BYTES_MAX, DIM_NAME_BYTES_MAX,
    IDEMPOTENCY_KEY_BYTES_MAX, NODE_GPUS_MAX, NODE_TEXT_BYTES_MAX, PLACEMENTS_MAX, RANK_MAX,
    REFUSAL_BYTES_MAX, SPEC_BYTES_MAX, STATE_BYTES_MAX, TENANT_BYTES_MAX, TENSOR_NAME_BYTES_MAX, TENSORS_MAX,
    text_prefix,
};
use millrace_types::workflow::TensorSource;
use millrace_types::{Dim, FunctionSpec, TenantName, TensorSpec, WorkflowSpec};

use crate::caller::{CallerName, IdempotencyKey};
use crate::command::{Proposal, StateCommand};
use crate::commands;
use crate::operation_record::{OperationRecord, OperationResult};
use crate::outcome::{CommandOutcome, CommandRefusal};
use crate::record::{
    Artifact, FunctionRecord, ModelSummary, NodeGpu, NodeRecord, TenantRecord, WorkflowRecord,
};
use crate::state::State;
use crate::table::{TableRecord, encoded_len};

/// Bytes of a state with empty tables, its policies included.
const STATE_BYTES_AROUND: u64 = 32 << 10;
/// Bytes of a function's record beside its key, caller and revisions: the names of the fields, and
/// numbers of nine bytes.
const FUNCTION_BYTES_AROUND: u64 = 136;
/// Bytes of an artifact's record beside its digest, model, holders, caller and profiles.
const ARTIFACT_BYTES_AROUND: u64 = 112;
/// Maximum bytes of a row with a function's key and some numbers.
const KEYED_BYTES_MAX: u64 = 288;
/// Maximum bytes of the record of a lost piece of data.
const LOST_BYTES_MAX: u64 = 112;

impl TableRecord for FunctionRecord {
    fn bytes(&self) -> u64 {
        let Self { key, updated_by, revisions, .. } = self;
        let revisions: u64 = revisions.iter().map(|revision| revision.encoded_len()).sum();
        FUNCTION_BYTES_AROUND + encoded_len(key) + encoded_len(updated_by) + revisions
    }
}

impl TableRecord for WorkflowRecord {}

impl TableRecord for Artifact {
    /// Does not depend on `uses` and `touched_at`.
    fn bytes(&self) -> u64 {
        let Self { digest, model, holders, created_by, profiles, .. } = self;
        let parts = [
            encoded_len(digest),
            encoded_len(model),
            encoded_len(holders),
            encoded_len(created_by),
            encoded_len(profiles),
        ];
        ARTIFACT_BYTES_AROUND + parts.iter().sum::<u64>()
    }
}

impl TableRecord for NodeRecord {}
impl TableRecord for TenantRecord {}
impl TableRecord for OperationRecord {}

/// A part of a command that is larger than its bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// A text is too long.
    #[error("{what} {begins:?} has {found} bytes, and {bound} is {limit}: shorten it")]
    Text {
        /// The part of the command that the text is.
        what: &'static str,
        /// The beginning of the text.
        begins: String,
        /// Bytes of the text.
        found: usize,
        /// Maximum bytes of the text.
        limit: usize,
        /// The name of the bound.
        bound: &'static str,
    },
    /// The command has too many parts of a kind.
    #[error("there are {found} {what}, and {bound} is {limit}: use fewer")]
    Count {
        /// The kind of the parts.
        what: &'static str,
        /// Number of parts.
        found: usize,
        /// Maximum number of parts.
        limit: usize,
        /// The name of the bound.
        bound: &'static str,
    },
    /// The spec is too large.
    #[error("the spec takes {found} bytes, and SPEC_BYTES_MAX is {SPEC_BYTES_MAX}: shorten its labels")]
    Spec {
        /// Bytes of the encoded spec.
        found: u64,
    },
}

impl From<SizeError> for CommandRefusal {
    fn from(error: SizeError) -> Self {
        Self::InvalidSpec { problem: error.to_string() }
    }
}

fn check_text(what: &'static str, text: &str, limit: usize, bound: &'static str) -> Result<(), SizeError> {
    if text.len() <= limit {
        return Ok(());
    }
    Err(SizeError::Text { what, begins: text_prefix(text, 32).to_owned(), found: text.len(), limit, bound })
}

fn check_count(what: &'static str, found: usize, limit: usize, bound: &'static str) -> Result<(), SizeError> {
    if found <= limit { Ok(()) } else { Err(SizeError::Count { what, found, limit, bound }) }
}

fn check_tensor_name(name: &str) -> Result<(), SizeError> {
    check_text("the tensor name", name, TENSOR_NAME_BYTES_MAX, "TENSOR_NAME_BYTES_MAX")
}

fn check_tensors(what: &'static str, tensors: &[TensorSpec]) -> Result<(), SizeError> {
    check_count(what, tensors.len(), TENSORS_MAX, "TENSORS_MAX")?;
    for tensor in tensors {
        check_tensor_name(&tensor.name)?;
        check_count("dimensions of a tensor", tensor.shape.len(), RANK_MAX, "RANK_MAX")?;
        for dim in &tensor.shape {
            if let Dim::Symbol(name) = dim {
                check_text("the dimension", name, DIM_NAME_BYTES_MAX, "DIM_NAME_BYTES_MAX")?;
            }
        }
    }
    Ok(())
}

/// Checks what a model declares against the bounds.
///
/// # Errors
/// The first [`SizeError`] found.
pub fn check_model(model: &ModelSummary) -> Result<(), SizeError> {
    check_tensors("inputs of the model", &model.inputs)?;
    check_tensors("outputs of the model", &model.outputs)
}

fn check_function(spec: &FunctionSpec) -> Result<(), SizeError> {
    for pair in spec.sequences.iter().flat_map(|sequences| &sequences.state) {
        check_tensor_name(&pair.input)?;
        check_tensor_name(&pair.output)?;
    }
    let found = encoded_len(spec);
    if found > SPEC_BYTES_MAX as u64 { Err(SizeError::Spec { found }) } else { Ok(()) }
}

fn check_workflow(spec: &WorkflowSpec) -> Result<(), SizeError> {
    let check_source = |source: &TensorSource| match source {
        TensorSource::Input(name) | TensorSource::Step { output: name, .. } => check_tensor_name(name),
    };
    for step in &spec.steps {
        step.inputs.keys().chain(&step.each).try_for_each(|name| check_tensor_name(name))?;
        step.inputs.values().chain(&step.when).try_for_each(check_source)?;
    }
    for output in &spec.outputs {
        check_tensor_name(&output.name)?;
        check_source(&output.from)?;
    }
    spec.inputs.iter().try_for_each(|name| check_tensor_name(name))
}

fn check_node(texts: [&str; 3], gpus: &[NodeGpu]) -> Result<(), SizeError> {
    check_count("GPUs of the node", gpus.len(), NODE_GPUS_MAX, "NODE_GPUS_MAX")?;
    let types = gpus.iter().map(|gpu| gpu.gpu_type.as_str());
    let check =
        |text: &str| check_text("the text of the node", text, NODE_TEXT_BYTES_MAX, "NODE_TEXT_BYTES_MAX");
    texts.into_iter().chain(types).try_for_each(check)
}

/// Checks everything that a write carries against the bounds on sizes. Reads no state.
///
/// # Errors
/// The first [`SizeError`] found.
pub fn check_sizes(
    caller: &CallerName,
    idempotency: Option<&IdempotencyKey>,
    command: &StateCommand,
) -> Result<(), SizeError> {
    check_text("the caller's name", &caller.0, CALLER_BYTES_MAX, "CALLER_BYTES_MAX")?;
    if let Some(key) = idempotency {
        let limit = IDEMPOTENCY_KEY_BYTES_MAX;
        let bound = "IDEMPOTENCY_KEY_BYTES_MAX";
        check_text("the idempotency key", &key.client, limit, bound)?;
    }
    match command {
        StateCommand::ApplyFunction { spec, .. } => check_function(spec),
        StateCommand::ApplyWorkflow { spec, .. } => check_workflow(spec),
        StateCommand::AddArtifact { model, .. } => check_model(model),
        StateCommand::RegisterNode { instance, address, gpus, topology, .. } => {
            check_node([instance, address, topology], gpus)
        }
        StateCommand::EndOperation { end: OperationResult::Failed { why }, .. } => {
            check_text("the reason", why, REFUSAL_BYTES_MAX, "REFUSAL_BYTES_MAX")
        }
        StateCommand::RecordTrial { gpu_type, .. } => {
            check_text("the type of GPU", gpu_type, NODE_TEXT_BYTES_MAX, "NODE_TEXT_BYTES_MAX")
        }
        _ => Ok(()),
    }
}

/// Returns `Some` if a command defines something that a client may delete, with the tenant that is
/// charged for it.
fn charged_tenant(command: &StateCommand) -> Option<Option<&TenantName>> {
    match command {
        StateCommand::ApplyFunction { spec, .. } => Some(Some(&spec.key.tenant)),
        StateCommand::ApplyWorkflow { spec, .. } => Some(Some(&spec.key.tenant)),
        StateCommand::SetQuota { tenant, .. } => Some(Some(tenant)),
        StateCommand::AddArtifact { .. } => Some(None),
        _ => None,
    }
}

impl State {
    /// Returns the bytes that the state takes: the size of its snapshot, or somewhat more.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let keyed = self.retired.len() + self.scores.len() + self.bills.len();
        STATE_BYTES_AROUND
            + self.definition_bytes()
            + self.nodes.bytes()
            + self.operations.bytes()
            + self.checkpoints.bytes()
            + self.sessions.bytes()
            + self.placements.bytes()
            + keyed as u64 * KEYED_BYTES_MAX
            + self.index.lost_len() as u64 * LOST_BYTES_MAX
    }

    /// Returns the part of [`Self::bytes`] that clients define: functions, workflows, model
    /// summaries and caps.
    #[must_use]
    pub fn definition_bytes(&self) -> u64 {
        self.functions.bytes() + self.workflows.bytes() + self.artifacts.bytes() + self.tenants.bytes()
    }

    /// Returns the part of [`Self::definition_bytes`] that belongs to a tenant.
    #[must_use]
    pub fn tenant_bytes(&self, tenant: &TenantName) -> u64 {
        self.functions.bytes_of(tenant) + self.workflows.bytes_of(tenant) + self.tenants.bytes_of(tenant)
    }

    /// Checks a write before it is proposed, so that a write that is too large or finds no room
    /// never reaches the log. The check covers the bounds alone; any other fault in the write is
    /// found when the write is applied. A repeated write passes, because the state has its answer.
    ///
    /// # Errors
    /// The [`CommandRefusal`] that applying the write would give, if the state does not change before.
    pub fn admit(&self, proposal: &Proposal) -> Result<(), CommandRefusal> {
        let Proposal { caller, idempotency, command, .. } = proposal;
        check_sizes(caller, idempotency.as_ref(), command)?;
        if idempotency.as_ref().is_some_and(|key| self.sessions.has_answer(caller, key)) {
            return Ok(());
        }
        commands::check_rules(self, command)?;
        self.check_state_capacity(command)?;
        match command {
            StateCommand::Place { .. } if self.placements.len() >= PLACEMENTS_MAX => {
                Err(CommandRefusal::full("placements", PLACEMENTS_MAX))
            }
            StateCommand::RegisterNode { .. } | StateCommand::BeginOperation { .. } => {
                capacity_refusal(self.dry_run(proposal).0)
            }
            StateCommand::ApplyFunction { spec, .. } if self.has_ample_capacity(spec) => Ok(()),
            command if charged_tenant(command).is_some() => {
                let (outcome, after) = self.dry_run(proposal);
                capacity_refusal(
                    outcome
                        .and_then(|applied| after.check_definition_capacity(self, command).map(|()| applied)),
                )
            }
            _ => Ok(()),
        }
    }

    /// Whether a change of this function needs no dry run, because the function exists and at most half
    /// of each bound is in use.
    fn has_ample_capacity(&self, spec: &FunctionSpec) -> bool {
        let half = |limit: usize| limit as u64 / 2;
        self.functions.contains_key(&spec.key)
            && self.tenant_bytes(&spec.key.tenant) <= half(TENANT_BYTES_MAX)
            && self.definition_bytes() <= half(DEFINITIONS_BYTES_MAX)
            && self.bytes() <= half(STATE_BYTES_MAX)
    }

    /// Applies a command under rules that bound the state. `carry_out` changes the state. If the
    /// command is refused, the state is as before.
    pub(crate) fn within_bounds(
        &mut self,
        proposal: &Proposal,
        carry_out: impl FnOnce(&mut Self) -> CommandOutcome,
    ) -> CommandOutcome {
        let Proposal { caller, idempotency, command, .. } = proposal;
        check_sizes(caller, idempotency.as_ref(), command)?;
        self.check_state_capacity(command)?;
        if charged_tenant(command).is_none() {
            return carry_out(self).map_err(CommandRefusal::shortened);
        }
        let before = self.clone();
        let outcome = carry_out(self)
            .and_then(|applied| self.check_definition_capacity(&before, command).map(|()| applied));
        if outcome.is_err() {
            *self = before;
        }
        outcome.map_err(CommandRefusal::shortened)
    }

    /// Refuses a command that adds records while the whole state has no room.
    fn check_state_capacity(&self, command: &StateCommand) -> Result<(), CommandRefusal> {
        let adds = match command {
            StateCommand::RegisterNode { .. }
            | StateCommand::Place { .. }
            | StateCommand::BeginOperation { .. }
            | StateCommand::RecordTrial { .. } => true,
            StateCommand::SetSlices { slices, .. } => !slices.is_empty(),
            StateCommand::SyncNode { batch, .. } => {
                let delta = &batch.delta;
                !(delta.models.is_empty()
                    && delta.entries.is_empty()
                    && delta.slo.is_empty()
                    && delta.usage.is_empty())
            }
            _ => false,
        };
        let bytes = self.bytes();
        if adds && bytes >= STATE_BYTES_MAX as u64 {
            return Err(CommandRefusal::out_of_bytes("the cluster", bytes, STATE_BYTES_MAX));
        }
        Ok(())
    }

    /// Refuses a definition that made the state larger than its bounds. A state that was over a
    /// bound before may not grow, but may shrink.
    fn check_definition_capacity(&self, before: &Self, command: &StateCommand) -> Result<(), CommandRefusal> {
        let Some(tenant) = charged_tenant(command) else { return Ok(()) };
        let check =
            |of: &dyn Fn() -> String, was: u64, is: u64, limit: usize| match is > was.max(limit as u64) {
                true => Err(CommandRefusal::out_of_bytes(&of(), is, limit)),
                false => Ok(()),
            };
        if let Some(tenant) = tenant {
            let of = || format!("tenant {tenant}");
            check(&of, before.tenant_bytes(tenant), self.tenant_bytes(tenant), TENANT_BYTES_MAX)?;
        }
        let of = || "all tenants".to_owned();
        check(&of, before.definition_bytes(), self.definition_bytes(), DEFINITIONS_BYTES_MAX)?;
        check(&|| "the cluster".to_owned(), before.bytes(), self.bytes(), STATE_BYTES_MAX)
    }

    /// Whether the nodes' checkpoints have room for another item. `taken_out` is the size of a
    /// checkpoint that is being changed, and that the table does not contain meanwhile.
    pub(crate) fn has_checkpoint_capacity(&self, taken_out: u64) -> bool {
        self.checkpoints.bytes() + taken_out < CHECKPOINTS_BYTES_MAX as u64
    }
}

/// Returns the refusal if the reason is a lack of room.
fn capacity_refusal(outcome: CommandOutcome) -> Result<(), CommandRefusal> {
    match outcome {
        Err(
            refusal @ (CommandRefusal::Full { .. }
            | CommandRefusal::OutOfBytes { .. }
            | CommandRefusal::ChangesUnderWay { .. }),
        ) => Err(refusal),
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
