//! Assignment of a request to a seat: expected times, counters, and the actions that inform the GPU.

use std::time::Duration;

use millrace_types::Timestamp;

use super::cost::SwapSource;
use super::dispatcher::{Dispatcher, RequestLocation};
use super::load_class::LoadClass;
use super::policy::CopyOrigin;
use super::protocol::Action;
use super::queue::WaitingRequest;
use super::seats::Assignment;
use millrace_core::ids::SeatIndex;

impl Dispatcher {
    pub(super) fn assign(
        &mut self,
        now: Timestamp,
        request: WaitingRequest,
        seat: SeatIndex,
        over: CopyOrigin,
        actions: &mut Vec<Action>,
    ) {
        let WaitingRequest { key, model: slot, attempts, .. } = request;
        self.queued -= 1;
        let before = self.places.insert(key, RequestLocation::On(seat));
        let model = self.models.get(slot);
        let id = model.id;
        let memory = model.memory;
        let to = self.fleet.gpu_of(seat);
        let gpu = self.fleet.get(to);
        let is_ahead = self.fleet.seat(seat).running.is_some();
        let incarnation = gpu.executor.expect("only GPUs with an executor are chosen");
        let hit = gpu.holds(slot);
        self.stats.hits += u64::from(hit);
        self.stats.misses += u64::from(!hit);
        self.stats.false_misses += u64::from(!hit && !model.holders.is_empty());
        let (source, from) = match over {
            CopyOrigin::Peer { holder, rate } if !hit => (SwapSource::Peer(rate), Some(holder)),
            CopyOrigin::Host | CopyOrigin::Peer { .. } => (self.fleet.source(to, slot), None),
        };
        let rows = self.rows(key);
        let run = self.models.run_time_of(slot, gpu.kind, rows);
        let loading = match source {
            SwapSource::Here => LoadClass::Nothing,
            SwapSource::Peer(_) => LoadClass::FromPeer,
            SwapSource::Host | SwapSource::SharedHost => {
                LoadClass::of(gpu.transfer_time(&self.models, slot), run)
            }
        };
        // Inputs that are copied while another request runs add no time.
        let inputs = self.inputs.get(&key).filter(|_| !is_ahead);
        let moved = inputs.map_or(Duration::ZERO, |inputs| self.fleet.move_time(inputs, to));
        let swap = gpu.swap_time(&self.models, slot, source).saturating_add(moved);
        let held = Assignment {
            request,
            rows,
            since: now,
            source,
            swap,
            ahead: is_ahead,
            // Part of the model may be there already, or inputs are copied beside it.
            unlike: (hit && source != SwapSource::Here) || !moved.is_zero(),
            predicted: run.map(|run| swap.saturating_add(run)),
            loading,
            recalled: false,
            withdrawn: false,
        };
        self.models.record_assignment(slot, to);
        if !hit {
            self.send_eviction_rank(slot, to, actions);
        }
        self.fleet.change_seat(seat, |gpu, seat| {
            gpu.add_resident(now, slot, memory);
            gpu.dispatched += 1;
            if is_ahead {
                seat.ahead.push_back(held);
            } else {
                seat.running = Some(held);
            }
        });
        if loading > LoadClass::FromPeer {
            self.fleet.cross_loads(seat);
        }
        let attempt = attempts.lost + 1;
        actions.push(Action::Assign { gpu: to, seat, key, model: id, incarnation, attempt, from });
        // Unpin only after the assignment: in the other order the GPU could evict the model between
        // the two actions.
        if let Some(RequestLocation::Queued { reserved, .. }) = before {
            self.unpin(&request, reserved, actions);
        }
    }
}
