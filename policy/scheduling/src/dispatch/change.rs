//! Changes of the policy, and of the number of open seats, while requests wait and run.
//!
//! **Policy.** The waiting requests enter the new policy in order of arrival, each once; requests on
//! GPUs stay there and end there. The change refuses no request, and resets the overtaking counts and
//! the idle times of the GPUs.
//!
//! **Open seats.** A seat that opens gets a waiting request at once. A seat that closes takes no
//! further request, and its requests end there, unless an idle seat recalls them.

use std::num::NonZeroU32;

use millrace_types::{Alphas, SloCounts, Timestamp};

use super::config::PolicyConfig;
use super::create_policy::create_policy;
use super::dispatcher::{CommittedAlphas, Dispatcher, RequestLocation};
use super::policy::QueueEntry;
use super::protocol::{Action, LatencyObjective};
use super::torpor::ALPHA_PERIOD;
use millrace_core::ids::FunctionIndex;
use millrace_memory::eviction::Eviction;

impl Dispatcher {
    pub(super) fn change(
        &mut self,
        now: Timestamp,
        policy: PolicyConfig,
        eviction: Eviction,
        functions: Vec<(FunctionIndex, Option<LatencyObjective>, SloCounts)>,
        actions: &mut Vec<Action>,
    ) {
        let evicts_otherwise = self.config.eviction != eviction;
        self.config.policy = policy;
        self.config.eviction = eviction;
        self.change_policy(now, functions, actions);
        if evicts_otherwise {
            for gpu in self.fleet.all() {
                for model in self.fleet.get(gpu).resident().collect::<Vec<_>>() {
                    self.send_eviction_rank(model, gpu, actions);
                }
            }
        }
    }

    /// Begins with the committed alphas of an earlier registration, now or with a policy that is set
    /// soon: the policy and the alphas arrive in any order.
    pub(super) fn commit_alphas(&mut self, now: Timestamp, alphas: Alphas) {
        self.committed = CommittedAlphas { alphas, until: now + ALPHA_PERIOD };
        self.begin_with_committed();
    }

    fn begin_with_committed(&mut self) {
        for (&priority, &alpha) in &self.committed.alphas {
            self.policy.begin_with(priority, alpha);
        }
    }

    fn change_policy(
        &mut self,
        now: Timestamp,
        functions: Vec<(FunctionIndex, Option<LatencyObjective>, SloCounts)>,
        actions: &mut Vec<Action>,
    ) {
        // The old policy's counters stay in the totals; its alphas do not.
        self.policy.add_stats(&mut self.stats);
        self.stats.alphas.clear();
        let (policy, idle_order) = create_policy(&self.config, self.sizes.len());
        self.policy = policy;
        self.stop_draining();
        self.fleet.reorder(idle_order);
        self.look_again = None;
        if now < self.committed.until {
            self.begin_with_committed();
        }
        for &(function, objective, _) in &functions {
            self.policy.objective(function, objective);
        }
        for &(function, _, counts) in &functions {
            self.policy.score(&self.models, function, counts);
        }
        self.policy.tick(now, &self.models);
        let waiting = self.places.values().filter_map(|place| match *place {
            RequestLocation::Queued { request, reserved } => Some((request, reserved)),
            RequestLocation::On(_) => None,
        });
        let of_policy = waiting.filter(|(request, _)| !self.sliced.has(request));
        for (request, reserved) in of_policy.collect::<Vec<_>>() {
            self.unpin(&request, reserved, actions);
            self.places.insert(request.key, RequestLocation::Queued { request, reserved: None });
            let entry = if request.attempts.lost > 0 { QueueEntry::Back } else { QueueEntry::New };
            self.policy.push(request, entry);
        }
        for gpu in self.fleet.all() {
            self.fleet.get(gpu).open_seats().for_each(|seat| self.policy.on_seat_freed(seat, gpu));
        }
    }

    /// Opens the first `open_seats` seats of each GPU, and closes the other seats.
    pub(super) fn open_seats(&mut self, open_seats: NonZeroU32) {
        self.config.open_seats = open_seats;
        for gpu in self.fleet.all() {
            self.fleet.open_seats(gpu, open_seats).for_each(|seat| self.policy.on_seat_freed(seat, gpu));
        }
    }
}
