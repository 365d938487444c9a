//! Recall of requests from busy seats, for seats that are idle.

use millrace_types::Timestamp;

use super::dispatcher::Dispatcher;
use super::policy::DispatchView;
use super::protocol::Action;
use super::seats::{ExpectedFinish, RECALL_COST};
use millrace_core::ids::SeatIndex;

impl Dispatcher {
    /// Recalls a request for each idle seat, if that seat would begin the request sooner.
    pub(super) fn recall(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        self.look_again = None;
        if self.fleet.askable().next().is_none() || !self.fleet.any_idle() {
            return;
        }
        let coming = self.fleet.asked();
        for to in self.fleet.all_idle().into_iter().skip(coming) {
            let Some((from, place)) = self.recall_from(now, to) else { continue };
            let key = self.fleet.change_seat(from, |_, seat| {
                let asked = &mut seat.ahead[place];
                asked.recalled = true;
                asked.request.key
            });
            actions.push(Action::Recall { gpu: self.fleet.gpu_of(from), key });
        }
    }

    /// Returns the request, by seat and position, that waits longest for its turn. The candidates
    /// are the last request on each seat, as far as `to` would begin that request sooner.
    fn recall_from(&mut self, now: Timestamp, to: SeatIndex) -> Option<(SeatIndex, usize)> {
        let mut best: Option<(ExpectedFinish, SeatIndex, usize)> = None;
        let mut look_again: Option<Timestamp> = None;
        let to = self.fleet.gpu_of(to);
        let idle = self.fleet.get(to);
        for from in self.fleet.askable() {
            let seat = self.fleet.seat(from);
            let Some(place) = seat.recallable().filter(|&place| seat.ahead[place].request.rank <= idle.rank)
            else {
                continue;
            };
            let request = seat.ahead[place].request;
            let view = DispatchView { now, fleet: &self.fleet, models: &self.models, inputs: &self.inputs };
            let there = ExpectedFinish::At(now + self.policy.bringing(&view, to, &request) + RECALL_COST);
            let turn = self.policy.expected_turn(&view, from, place);
            if turn > there {
                best = best.max(Some((turn, from, place)));
            } else if let Some(late) = self.policy.overdue_at(&view, from) {
                // If the running request exceeds its expected time, the idle seat should take over
                // after all.
                look_again = Some(look_again.map_or(late, |other| other.min(late)));
            }
        }
        if best.is_none()
            && let Some(at) = look_again
        {
            self.look_again = Some(self.look_again.map_or(at, |other| other.min(at)));
        }
        best.map(|(_, from, place)| (from, place))
    }
}
