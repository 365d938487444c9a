//! The quota of the state: how many bytes the state takes, and whether a write keeps to the bounds
//! of [`millrace_types::limits`]. In: a state, and a proposal. Out: a [`Refusal`], or nothing.
//!
//! ```text
//!   propose()            leader                          every replica
//!   ─ check_sizes ──▶  ─ State::admit ──▶  the log  ──▶  check_sizes, then the command, then
//!                        on a trial of the               check_room: a definition that does not
//!                        command                         fit is taken back
//! ```
//!
//! Each table of the state counts its own bytes ([`crate::table`]). All other records have a
//! bounded size, so their number bounds their bytes. A command that deletes or ends something
//! always passes.

use millrace_types::limits::{
    CALLER_BYTES_MAX, CHECKPOINTS_BYTES_MAX, DEFINITIONS_BYTES_MAX, DIM_NAME_BYTES_MAX,
    IDEMPOTENCY_KEY_BYTES_MAX, NODE_GPUS_MAX, NODE_TEXT_BYTES_MAX, PLACEMENTS_MAX, RANK_MAX,
    REFUSAL_BYTES_MAX, SPEC_BYTES_MAX, STATE_BYTES_MAX, TENANT_BYTES_MAX, TENSOR_NAME_BYTES_MAX, TENSORS_MAX,
    beginning,
};
use millrace_types::workflow::Source;
use millrace_types::{Dim, FunctionSpec, TenantName, TensorSpec, WorkflowSpec};

use crate::command::{Caller, Command, IdempotencyKey, Proposal};
use crate::operations::{End, Operation};
use crate::outcome::{Outcome, Refusal};
use crate::record::{Artifact, Function, ModelSummary, Node, NodeGpu, Tenant, Workflow};
use crate::state::State;
use crate::table::{Record, encoded_len};

/// Bytes of a state with empty tables, its policies included.
const STATE_BYTES_AROUND: u64 = 32 << 10;
/// Maximum bytes of a row with a function's key and some numbers.
const KEYED_BYTES_MAX: u64 = 288;
/// Maximum bytes of the record of a lost piece of data.
const LOST_BYTES_MAX: u64 = 112;

impl Record for Function {}
impl Record for Workflow {}
impl Record for Artifact {}
impl Record for Node {}
impl Record for Tenant {}
impl Record for Operation {}

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

impl From<SizeError> for Refusal {
    fn from(error: SizeError) -> Self {
        Self::InvalidSpec { problem: error.to_string() }
    }
}

fn check_text(what: &'static str, text: &str, limit: usize, bound: &'static str) -> Result<(), SizeError> {
    if text.len() <= limit {
        return Ok(());
    }
    Err(SizeError::Text { what, begins: beginning(text, 32).to_owned(), found: text.len(), limit, bound })
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
    let check_source = |source: &Source| match source {
        Source::Input(name) | Source::Step { output: name, .. } => check_tensor_name(name),
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
    caller: &Caller,
    idempotency: Option<&IdempotencyKey>,
    command: &Command,
) -> Result<(), SizeError> {
    check_text("the caller's name", &caller.0, CALLER_BYTES_MAX, "CALLER_BYTES_MAX")?;
    if let Some(key) = idempotency {
        let limit = IDEMPOTENCY_KEY_BYTES_MAX;
        let bound = "IDEMPOTENCY_KEY_BYTES_MAX";
        check_text("the idempotency key", &key.client, limit, bound)?;
    }
    match command {
        Command::ApplyFunction { spec, .. } => check_function(spec),
        Command::ApplyWorkflow { spec, .. } => check_workflow(spec),
        Command::AddArtifact { model, .. } => check_model(model),
        Command::RegisterNode { instance, address, gpus, topology, .. } => {
            check_node([instance, address, topology], gpus)
        }
        Command::EndOperation { end: End::Failed { why }, .. } => {
            check_text("the reason", why, REFUSAL_BYTES_MAX, "REFUSAL_BYTES_MAX")
        }
        _ => Ok(()),
    }
}

/// Returns `Some` if a command defines something that a client may delete, with the tenant that is
/// charged for it.
fn defines(command: &Command) -> Option<Option<&TenantName>> {
    match command {
        Command::ApplyFunction { spec, .. } => Some(Some(&spec.key.tenant)),
        Command::ApplyWorkflow { spec, .. } => Some(Some(&spec.key.tenant)),
        Command::SetQuota { tenant, .. } => Some(Some(tenant)),
        Command::AddArtifact { .. } => Some(None),
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
    /// The [`Refusal`] that applying the write would give, if the state does not change before.
    pub fn admit(&self, proposal: &Proposal) -> Result<(), Refusal> {
        let Proposal { caller, idempotency, command, .. } = proposal;
        check_sizes(caller, idempotency.as_ref(), command)?;
        if idempotency.as_ref().is_some_and(|key| self.sessions.knows(caller, key)) {
            return Ok(());
        }
        self.check_open(command)?;
        match command {
            Command::Place { .. } if self.placements.len() >= PLACEMENTS_MAX => {
                Err(Refusal::full("placements", PLACEMENTS_MAX))
            }
            Command::RegisterNode { .. } | Command::BeginOperation { .. } => {
                out_of_room(self.dry_run(proposal).0)
            }
            command if defines(command).is_some() => {
                let (outcome, after) = self.dry_run(proposal);
                out_of_room(outcome.and_then(|applied| after.check_room(self, command).map(|()| applied)))
            }
            _ => Ok(()),
        }
    }

    /// Applies a command under rules that have a quota. `carry_out` changes the state. If the
    /// command is refused, the state is as before.
    pub(crate) fn within_quota(
        &mut self,
        proposal: &Proposal,
        carry_out: impl FnOnce(&mut Self) -> Outcome,
    ) -> Outcome {
        let Proposal { caller, idempotency, command, .. } = proposal;
        check_sizes(caller, idempotency.as_ref(), command)?;
        self.check_open(command)?;
        if defines(command).is_none() {
            return carry_out(self).map_err(Refusal::shortened);
        }
        let before = self.clone();
        let outcome = carry_out(self).and_then(|applied| self.check_room(&before, command).map(|()| applied));
        if outcome.is_err() {
            *self = before;
        }
        outcome.map_err(Refusal::shortened)
    }

    /// Refuses a command that adds records while the whole state has no room.
    fn check_open(&self, command: &Command) -> Result<(), Refusal> {
        let adds = match command {
            Command::RegisterNode { .. } | Command::Place { .. } | Command::BeginOperation { .. } => true,
            Command::SyncNode { batch, .. } => {
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
            return Err(Refusal::out_of_bytes("the cluster", bytes, STATE_BYTES_MAX));
        }
        Ok(())
    }

    /// Refuses a definition that made the state larger than its bounds. A state that was over a
    /// bound before may not grow, but may shrink.
    fn check_room(&self, before: &Self, command: &Command) -> Result<(), Refusal> {
        let Some(tenant) = defines(command) else { return Ok(()) };
        let check =
            |of: &dyn Fn() -> String, was: u64, is: u64, limit: usize| match is > was.max(limit as u64) {
                true => Err(Refusal::out_of_bytes(&of(), is, limit)),
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
    pub(crate) fn has_checkpoint_room(&self, taken_out: u64) -> bool {
        self.checkpoints.bytes() + taken_out < CHECKPOINTS_BYTES_MAX as u64
    }
}

/// Returns the refusal if the reason is a lack of room.
fn out_of_room(outcome: Outcome) -> Result<(), Refusal> {
    match outcome {
        Err(
            refusal @ (Refusal::Full { .. } | Refusal::OutOfBytes { .. } | Refusal::ChangesUnderWay { .. }),
        ) => Err(refusal),
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
