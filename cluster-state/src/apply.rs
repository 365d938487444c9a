//! [`State::apply`], the single way to change the state, and the dry run of a command.

use crate::command::{Proposal, StateCommand};
use crate::commands;
use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::rules::{KnownRules, RulesVersion, UnknownRules};
use crate::state::State;

impl State {
    /// Applies the next command of the log. Several commands may share one `index`, because a log
    /// entry is a batch. The caller has [checked](Self::check_rules) that this build knows the
    /// rules.
    ///
    /// The clock advances and sessions expire even if the command is refused; a refused command
    /// changes nothing else. Debug builds check the [invariants](Self::check_invariants) after the
    /// command.
    ///
    /// # Errors
    /// The command's [`CommandRefusal`]. A refusal is an answer, and is replicated as any other answer.
    ///
    /// # Panics
    /// In debug builds, if an invariant is broken, which is a bug of this crate.
    pub fn apply(&mut self, index: u64, proposal: &Proposal) -> CommandOutcome {
        debug_assert!(index >= self.applied_index, "the log runs forward");
        self.applied_index = index;
        self.clock = self.clock.max(proposal.stamp);
        self.sessions.expire(self.clock);
        self.expire_operations();
        let outcome = self.apply_once(proposal);
        if cfg!(debug_assertions)
            && let Err(violation) = self.check_after(&proposal.command)
        {
            panic!("after {:?}: {violation}", proposal.command);
        }
        outcome
    }

    fn apply_once(&mut self, proposal: &Proposal) -> CommandOutcome {
        let Some(key) = &proposal.idempotency else { return self.carry_out(proposal) };
        let digest = proposal.command.digest();
        if let Some(answer) = self.sessions.find_answer(&proposal.caller, key, digest) {
            return answer;
        }
        let outcome = self.carry_out(proposal);
        self.sessions.store_answer(&proposal.caller, key, digest, outcome.clone(), self.clock);
        outcome
    }

    fn carry_out(&mut self, proposal: &Proposal) -> CommandOutcome {
        let outcome = match self.rules.has_state_bounds() {
            true => self.within_bounds(proposal, |state| state.carry_out_command(proposal)),
            false => self.carry_out_command(proposal),
        };
        if outcome.as_ref().is_ok_and(|applied| applied.changed()) {
            self.settle_operations();
        }
        outcome
    }

    fn carry_out_command(&mut self, proposal: &Proposal) -> CommandOutcome {
        let context = CommandContext { now: self.clock, caller: &proposal.caller };
        let begins = matches!(
            proposal.command,
            StateCommand::InitCluster { .. } | StateCommand::SetClusterVersion { .. }
        );
        if self.cluster.is_none() && !begins {
            return Err(CommandRefusal::NotInitialized);
        }
        commands::check_rules(self, &proposal.command)?;
        match &proposal.command {
            StateCommand::InitCluster { cluster_id } => commands::init_cluster(self, context, cluster_id),
            StateCommand::ApplyFunction { spec, digest, expected, voters } => {
                commands::apply_function(self, context, spec, *digest, *expected, voters)
            }
            StateCommand::DeleteFunction { key, expected } => {
                commands::delete_function(self, context, key, *expected)
            }
            StateCommand::SetFunctionEnabled { key, enabled } => {
                commands::set_function_enabled(self, context, key, *enabled)
            }
            StateCommand::AddArtifact { digest, bytes, model, holder } => {
                commands::add_artifact(self, context, *digest, *bytes, model, *holder)
            }
            StateCommand::RemoveArtifact { digest, unused_since } => {
                commands::remove_artifact(self, *digest, *unused_since)
            }
            StateCommand::RegisterNode { name, instance, address, gpus, topology, host_memory, seen } => {
                let host_memory = *host_memory;
                let seen = *seen;
                let node =
                    commands::RegistrationRequest { instance, address, gpus, topology, host_memory, seen };
                commands::register_node(self, context, name, node)
            }
            StateCommand::NodeLost { name, epoch } => commands::node_lost(self, context, name, *epoch),
            StateCommand::SyncNode { node, batch } => commands::sync_node(self, node, batch),
            StateCommand::Place { function, node, reason } => {
                commands::place(self, context, function, node, *reason)
            }
            StateCommand::Unplace { function, node } => commands::unplace(self, function, node),
            StateCommand::SetSlices { node, slices } => commands::set_slices(self, node, slices),
            StateCommand::SetNodeScheduling { name, scheduling } => {
                commands::set_node_scheduling(self, context, name, *scheduling)
            }
            StateCommand::RemoveNode { name } => commands::remove_node(self, name),
            StateCommand::RemoveArtifactHolder { digest, holder } => {
                commands::remove_artifact_holder(self, *digest, *holder)
            }
            StateCommand::SetQuota { tenant, quota } => commands::set_quota(self, context, tenant, *quota),
            StateCommand::ApplyWorkflow { spec, expected } => {
                commands::apply_workflow(self, context, spec, *expected)
            }
            StateCommand::DeleteWorkflow { key, expected } => commands::delete_workflow(self, key, *expected),
            StateCommand::SetPolicy { spec, settings, expected } => {
                commands::set_policy(self, context, *spec, settings, *expected)
            }
            StateCommand::BeginOperation { kind } => commands::begin_operation(self, context, kind),
            StateCommand::RecordTrial { operation, gpu_type, point } => {
                commands::record_trial(self, *operation, gpu_type, point)
            }
            StateCommand::EndOperation { id, end } => commands::end_operation(self, context, *id, end),
            StateCommand::SetClusterVersion { version } => commands::set_cluster_version(self, *version),
        }
    }

    /// Returns the answer that [`Self::apply`] would give, and the state after the command.
    /// Changes nothing. Do not call this before a write to predict its answer: the state may have
    /// changed when the write is applied.
    pub fn dry_run(&self, proposal: &Proposal) -> (CommandOutcome, Self) {
        let mut after = self.clone();
        after.clock = after.clock.max(proposal.stamp);
        after.sessions.expire(after.clock);
        after.expire_operations();
        let outcome = after.carry_out(proposal);
        (outcome, after)
    }

    /// Admits and applies a proposal on a copy, as the leader would, and returns the copy after it.
    ///
    /// # Errors
    /// The [`CommandRefusal`] of the leader or of the command.
    pub fn admitted_dry_run(&self, proposal: &Proposal) -> Result<(CommandEffect, Self), CommandRefusal> {
        self.admit(proposal)?;
        let (outcome, after) = self.dry_run(proposal);
        Ok((outcome?, after))
    }

    /// Whether a build that knows these rules can apply a command to this state.
    ///
    /// # Errors
    /// [`UnknownRules`] if the build does not know the rules in force, or the rules to which the
    /// command switches.
    pub fn check_rules(&self, known: KnownRules, proposal: &Proposal) -> Result<(), UnknownRules> {
        match &proposal.command {
            StateCommand::SetClusterVersion { version } if self.may_switch_to(*version) => {
                known.check(*version)
            }
            _ => known.check(self.rules),
        }
    }

    /// Whether the rules may switch to this version. A cluster switches one version at a time. A
    /// cluster that has no name yet has no history, and starts with the newest rules of its first
    /// controller.
    pub(crate) fn may_switch_to(&self, version: RulesVersion) -> bool {
        match self.cluster {
            None => version >= self.rules,
            Some(_) => version == self.rules.next(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::TestLog;

    fn known(newest: u64) -> KnownRules {
        KnownRules::up_to(RulesVersion(newest))
    }

    fn set(version: u64) -> StateCommand {
        StateCommand::SetClusterVersion { version: RulesVersion(version) }
    }

    #[test]
    fn a_command_is_refused_by_a_build_that_does_not_know_the_rules_it_leads_to() {
        let mut log = TestLog::of_rules(RulesVersion(9));
        let check =
            |log: &TestLog, newest, command| log.state.check_rules(known(newest), &log.proposal(command));
        let other = || StateCommand::RemoveNode { name: crate::commands::testing::node_name("n") };
        assert!(check(&log, 9, other()).is_ok() && check(&log, 10, other()).is_ok());
        assert!(check(&log, 11, other()).is_err(), "rules 9 are older than the build knows");
        assert!(check(&log, 9, set(10)).is_err(), "the build knows up to 9");
        assert!(check(&log, 10, set(10)).is_ok());
        assert!(check(&log, 9, set(12)).is_ok(), "refused by every build, as 12 does not follow 9");
        log.apply(set(10)).unwrap();
        assert!(check(&log, 9, other()).is_err() && check(&log, 11, other()).is_ok());
    }

    #[test]
    fn an_unnamed_cluster_starts_with_any_rules_that_the_build_knows() {
        let mut fresh = TestLog::empty();
        fresh.state = State::default();
        let check = |newest, command| fresh.state.check_rules(known(newest), &fresh.proposal(command));
        assert!(check(12, set(12)).is_ok());
        assert!(check(11, set(12)).is_err());
        let named = StateCommand::InitCluster { cluster_id: millrace_types::ClusterId("test".into()) };
        assert!(check(10, named.clone()).is_ok());
        assert!(check(11, named).is_err(), "a log that names no version is of rules 9");
    }
}
