//! The seams that keep actix replaceable: an actor here is a [`Behaviour`], its address a
//! [`Mailbox`], its peers [`Slot`]s. Nothing else in the crate knows how messages are delivered or
//! how timers fire.
//!
//! One timer per actor over the core's own deadlines (every pending future of an actix actor is
//! polled at each of its wakes); no replies awaited, so no handler ever interleaves with another;
//! a panic in a handler ends that actor alone and is reported, because actix's own supervisor does
//! not restart after one.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use actix::{Actor, AsyncContext, Context, Handler, Recipient, SpawnHandle};
use actix::{ActorContext as _, Addr};
use millrace_types::Timestamp;

use crate::clock::{Clock, Sleeper};

/// Letters that an actor may have to read, for each request that a node holds at most, before requests are
/// refused. A request alone never meets the bound: no actor is sent as many for it. actix bounds no mailbox
/// against `do_send`, and letters between actors must not be lost, so the bound is kept where requests enter.
pub(crate) const LETTERS_PER_REQUEST: usize = 16;

/// What an actor does with its messages. State is owned outright; calls never overlap.
pub(crate) trait Behaviour: Unpin + 'static {
    /// What it is told. Bounded by its senders: every message belongs to a request that holds a
    /// permit, a grant, a process or a function installed here.
    type Message: Send + 'static;

    /// Handles one message.
    fn handle(&mut self, now: Timestamp, message: Self::Message);

    /// Called when [`Self::next_wake`] has come.
    fn tick(&mut self, now: Timestamp);

    /// When it has to be woken next, if no message comes before.
    fn next_wake(&self) -> Option<Timestamp>;

    /// Whether it has done all it will: it ends then, whoever has its address. One that has its own never
    /// ends otherwise.
    fn is_over(&self) -> bool {
        false
    }
}

/// An actor's address. Posting never blocks and never fails: what reaches an actor that ended is
/// dropped, and with it whatever answers it carried.
pub(crate) struct Mailbox<M: Send + 'static> {
    recipient: Recipient<Letter<M>>,
    unread: Unread,
}

/// How many letters an actor has not read yet. Of this actor alone: one that is started again counts from
/// zero, whatever was lost with the one before. Relaxed, as the number guards nothing.
#[derive(Clone, Default)]
struct Unread(Arc<AtomicUsize>);

impl<M: Send + 'static> Mailbox<M> {
    pub(crate) fn post(&self, message: M) {
        self.unread.0.fetch_add(1, Ordering::Relaxed);
        self.recipient.do_send(Letter(message));
    }

    /// How many letters the actor has yet to read.
    pub(crate) fn unread(&self) -> usize {
        self.unread.0.load(Ordering::Relaxed)
    }
}

impl<M: Send + 'static> Clone for Mailbox<M> {
    fn clone(&self) -> Self {
        Self { recipient: self.recipient.clone(), unread: self.unread.clone() }
    }
}

impl<M: Send + 'static> fmt::Debug for Mailbox<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mailbox")
    }
}

/// Where a peer's present address is found on the actor thread. An actor that is started again
/// has a new address, published here with the next epoch: what was sent to the old one is gone.
pub(crate) struct Slot<M: Send + 'static>(Rc<Published<M>>);

struct Published<M: Send + 'static> {
    mailbox: RefCell<Option<Mailbox<M>>>,
    epoch: Cell<u64>,
}

impl<M: Send + 'static> Slot<M> {
    pub(crate) fn empty() -> Self {
        Self(Rc::new(Published { mailbox: RefCell::new(None), epoch: Cell::new(0) }))
    }

    pub(crate) fn publish(&self, mailbox: Mailbox<M>) {
        *self.0.mailbox.borrow_mut() = Some(mailbox);
        self.0.epoch.set(self.0.epoch.get() + 1);
    }

    pub(crate) fn post(&self, message: M) {
        if let Some(mailbox) = &*self.0.mailbox.borrow() {
            mailbox.post(message);
        }
    }

    /// The present address, for those that are to be heard by no later one.
    pub(crate) fn mailbox(&self) -> Option<Mailbox<M>> {
        self.0.mailbox.borrow().clone()
    }

    /// How often an address was published here.
    pub(crate) fn epoch(&self) -> u64 {
        self.0.epoch.get()
    }
}

impl<M: Send + 'static> Clone for Slot<M> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

/// Starts an actor on this thread. It ends when its last address is dropped, or when it says so.
/// `panicked` is told, once, when a handler panicked: by then its state is dropped and its mailbox closed.
pub(crate) fn spawn<B: Behaviour>(
    behaviour: B,
    clock: Arc<dyn Clock>,
    sleeper: Sleeper,
    panicked: impl FnOnce(String) + 'static,
) -> Mailbox<B::Message> {
    let panicked: Option<Box<dyn FnOnce(String)>> = Some(Box::new(panicked));
    let unread = Unread::default();
    let shell =
        Shell { behaviour: Some(behaviour), clock, sleeper, armed: None, panicked, unread: unread.clone() };
    let address: Addr<Shell<B>> = shell.start();
    Mailbox { recipient: address.recipient(), unread }
}

struct Letter<M>(M);

impl<M> actix::Message for Letter<M> {
    type Result = ();
}

struct Shell<B: Behaviour> {
    behaviour: Option<B>,
    clock: Arc<dyn Clock>,
    sleeper: Sleeper,
    armed: Option<(Timestamp, SpawnHandle)>,
    panicked: Option<Box<dyn FnOnce(String)>>,
    unread: Unread,
}

impl<B: Behaviour> Actor for Shell<B> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        let now = self.clock.now();
        self.rearm(now, ctx);
    }
}

impl<B: Behaviour> Handler<Letter<B::Message>> for Shell<B> {
    type Result = ();

    fn handle(&mut self, Letter(message): Letter<B::Message>, ctx: &mut Context<Self>) {
        self.unread.0.fetch_sub(1, Ordering::Relaxed);
        let now = self.clock.now();
        self.guarded(now, ctx, |behaviour| behaviour.handle(now, message));
    }
}

impl<B: Behaviour> Shell<B> {
    fn guarded(&mut self, now: Timestamp, ctx: &mut Context<Self>, work: impl FnOnce(&mut B)) {
        // None after the end: messages of the same wake still come.
        let Some(behaviour) = &mut self.behaviour else { return };
        // The state is dropped after a panic, so that nobody sees it half-changed.
        match catch_unwind(AssertUnwindSafe(|| work(behaviour))) {
            Ok(()) if self.behaviour.as_ref().is_some_and(Behaviour::is_over) => self.end(ctx),
            Ok(()) => self.rearm(now, ctx),
            Err(panic) => self.end_after(&*panic, ctx),
        }
    }

    fn end(&mut self, ctx: &mut Context<Self>) {
        self.behaviour = None;
        ctx.stop();
    }

    fn end_after(&mut self, panic: &(dyn std::any::Any + Send), ctx: &mut Context<Self>) {
        self.end(ctx);
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        if let Some(panicked) = self.panicked.take() {
            panicked(text.unwrap_or_else(|| "a panic without a text".to_owned()));
        }
    }

    /// Arms the timer for the next wake, unless it is armed for an earlier one: that one finds
    /// nothing due and arms it again, which is cheaper than moving the timer at every message.
    fn rearm(&mut self, now: Timestamp, ctx: &mut Context<Self>) {
        let Some(at) = self.behaviour.as_ref().and_then(Behaviour::next_wake) else { return };
        let at = self.clock.wake_at(at.max(now), self.sleeper);
        if let Some((armed, handle)) = self.armed {
            if armed <= at {
                return;
            }
            ctx.cancel_future(handle);
        }
        let handle = ctx.run_later(self.clock.sleep_for(at.since(now)), Self::fired);
        self.armed = Some((at, handle));
    }

    fn fired(&mut self, ctx: &mut Context<Self>) {
        self.armed = None;
        let now = self.clock.now();
        let due = self.behaviour.as_ref().and_then(Behaviour::next_wake).is_some_and(|at| at <= now);
        if due {
            self.guarded(now, ctx, |behaviour| behaviour.tick(now));
        } else {
            self.rearm(now, ctx);
        }
    }
}

/// An actor that passes on what it is told.
#[cfg(test)]
pub(crate) fn heard<M: Send + 'static>() -> (Mailbox<M>, tokio::sync::mpsc::UnboundedReceiver<M>) {
    struct Heard<M>(tokio::sync::mpsc::UnboundedSender<M>);

    impl<M: Send + 'static> Behaviour for Heard<M> {
        type Message = M;
        fn handle(&mut self, _: Timestamp, message: M) {
            // The test may have ended.
            self.0.send(message).unwrap_or_default();
        }
        fn tick(&mut self, _: Timestamp) {}
        fn next_wake(&self) -> Option<Timestamp> {
            None
        }
    }

    let (sender, told) = tokio::sync::mpsc::unbounded_channel();
    (spawn(Heard(sender), Arc::new(crate::clock::MonotonicClock), Sleeper::OUTSIDE, |_| {}), told)
}
