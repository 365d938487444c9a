//! Opening and closing of seats while requests wait and run. The first seats of each GPU are open, and
//! the number of open seats is the same on all GPUs, as far as they have so many seats. Seats keep
//! their numbers.
//!
//! A seat that closes takes no new request, neither to run nor to wait behind another. The requests
//! of the seat end there. A request that waits on a closed seat can still be recalled, because an
//! idle open seat would begin the request sooner. After the requests of the closed seats have ended,
//! an event costs as much as on a GPU that has only the open seats.

use std::num::NonZeroU32;

use super::dispatcher::Dispatcher;

impl Dispatcher {
    /// Opens the first `seats` seats of each GPU, and closes the others.
    pub(super) fn open_seats(&mut self, seats: NonZeroU32) {
        self.config.open_seats = seats;
        for gpu in self.fleet.all() {
            let open_before = self.fleet.get(gpu).open_seats().len();
            self.fleet.change(gpu, |it, _| it.open_first(seats));
            let opened = self.fleet.get(gpu).open_seats().skip(open_before);
            opened.for_each(|seat| self.policy.on_seat_freed(seat, gpu));
        }
    }
}
