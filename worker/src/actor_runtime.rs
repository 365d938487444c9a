//! The actor runtime, which keeps actix replaceable. An actor is a [`ActorBehaviour`], its address a
//! [`Mailbox`], and its peers are [`AddressSlot`]s. No other module depends on how messages are delivered
//! or timers fire.
//!
//! Three rules follow from actix. Each actor has one timer for all of its core's deadlines, because
//! actix polls every pending future of an actor at each wake. No handler awaits a reply, so
//! handlers never interleave. A panic in a handler ends that actor alone and is reported, because
//! actix's own supervisor does not restart an actor after a panic.

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

/// Unread messages that an actor may have, for each request that a node may hold, before new
/// requests are refused. A single request never reaches the bound, because no actor gets as many
/// messages for it. actix bounds no mailbox against `do_send`, and messages between actors must not
/// be lost, so the bound is enforced where requests enter.
pub(crate) const LETTERS_PER_REQUEST: usize = 16;

/// The handlers of an actor. The actor owns its state outright, and calls never overlap.
pub(crate) trait ActorBehaviour: Unpin + 'static {
    /// Messages to the actor. Their number is bounded by the senders: each message belongs to a
    /// request that holds a permit, a grant, a process or an installed function.
    type Message: Send + 'static;

    /// Handles one message.
    fn handle(&mut self, now: Timestamp, message: Self::Message);

    /// Handles the passing of the time that [`Self::next_wake`] returned.
    fn tick(&mut self, now: Timestamp);

    /// Returns the time at which the actor has to be woken if no message arrives earlier.
    fn next_wake(&self) -> Option<Timestamp>;

    /// Whether the actor's work is finished. The actor then ends even if its address is still in
    /// use. An actor that holds its own address ends in no other way.
    fn is_over(&self) -> bool {
        false
    }
}

/// An actor's address. Posting never blocks and never fails: a message to an actor that has ended
/// is dropped, with the reply channels that it carries.
pub(crate) struct Mailbox<M: Send + 'static> {
    recipient: Recipient<Letter<M>>,
    unread: Unread,
}

/// The number of messages that an actor has not read yet. A restarted actor counts from zero,
/// because the unread messages of its predecessor are lost. Accesses are relaxed: the number guards
/// no other data.
#[derive(Clone, Default)]
struct Unread(Arc<AtomicUsize>);

impl<M: Send + 'static> Mailbox<M> {
    pub(crate) fn post(&self, message: M) {
        self.unread.0.fetch_add(1, Ordering::Relaxed);
        self.recipient.do_send(Letter(message));
    }

    /// Returns the number of messages that the actor has not read yet.
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

/// A place on the actor thread for the present address of a peer. A restarted actor publishes its
/// new address here, which increments the epoch; messages to the old address are lost.
pub(crate) struct AddressSlot<M: Send + 'static>(Rc<Published<M>>);

struct Published<M: Send + 'static> {
    mailbox: RefCell<Option<Mailbox<M>>>,
    epoch: Cell<u64>,
}

impl<M: Send + 'static> AddressSlot<M> {
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

    /// Returns the present address, for messages that no later actor may receive.
    pub(crate) fn mailbox(&self) -> Option<Mailbox<M>> {
        self.0.mailbox.borrow().clone()
    }

    /// Returns the number of addresses published here so far.
    pub(crate) fn epoch(&self) -> u64 {
        self.0.epoch.get()
    }
}

impl<M: Send + 'static> Clone for AddressSlot<M> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

/// A started actor, from which the mailboxes for its kinds of messages are made.
pub(crate) struct StartedActor<B: ActorBehaviour> {
    address: Addr<ActorShell<B>>,
    unread: Unread,
}

impl<B: ActorBehaviour> StartedActor<B> {
    /// Returns the actor's mailbox for messages of type `B::Message`, or of a type that converts into
    /// `B::Message`. All mailboxes of an actor feed a single queue.
    pub(crate) fn mailbox<M: Into<B::Message> + Send + 'static>(&self) -> Mailbox<M> {
        Mailbox { recipient: self.address.clone().recipient(), unread: self.unread.clone() }
    }
}

/// Starts an actor on this thread. The actor ends when its last address is dropped or its behaviour
/// is over. If a handler panics, `panicked` is called once; the actor's state is dropped and its
/// mailbox closed by then.
pub(crate) fn spawn<B: ActorBehaviour>(
    behaviour: B,
    clock: Arc<dyn Clock>,
    sleeper: Sleeper,
    panicked: impl FnOnce(String) + 'static,
) -> StartedActor<B> {
    let panicked: Option<Box<dyn FnOnce(String)>> = Some(Box::new(panicked));
    let unread = Unread::default();
    let shell = ActorShell {
        behaviour: Some(behaviour),
        clock,
        sleeper,
        armed: None,
        panicked,
        unread: unread.clone(),
    };
    StartedActor { address: shell.start(), unread }
}

struct Letter<M>(M);

impl<M> actix::Message for Letter<M> {
    type Result = ();
}

struct ActorShell<B: ActorBehaviour> {
    behaviour: Option<B>,
    clock: Arc<dyn Clock>,
    sleeper: Sleeper,
    armed: Option<(Timestamp, SpawnHandle)>,
    panicked: Option<Box<dyn FnOnce(String)>>,
    unread: Unread,
}

impl<B: ActorBehaviour> Actor for ActorShell<B> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        let now = self.clock.now();
        self.rearm(now, ctx);
    }
}

impl<B: ActorBehaviour, M: Into<B::Message> + Send + 'static> Handler<Letter<M>> for ActorShell<B> {
    type Result = ();

    fn handle(&mut self, Letter(message): Letter<M>, ctx: &mut Context<Self>) {
        self.unread.0.fetch_sub(1, Ordering::Relaxed);
        let now = self.clock.now();
        self.guarded(now, ctx, |behaviour| behaviour.handle(now, message.into()));
    }
}

impl<B: ActorBehaviour> ActorShell<B> {
    fn guarded(&mut self, now: Timestamp, ctx: &mut Context<Self>, work: impl FnOnce(&mut B)) {
        // None after the end: messages delivered in the same wake still arrive.
        let Some(behaviour) = &mut self.behaviour else { return };
        // A panic leaves the state half-changed, so the state is dropped and never read again.
        match catch_unwind(AssertUnwindSafe(|| work(behaviour))) {
            Ok(()) if self.behaviour.as_ref().is_some_and(ActorBehaviour::is_over) => self.end(ctx),
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
            panicked(text.unwrap_or_else(|| "a panic without a message".to_owned()));
        }
    }

    /// Arms the timer for the next wake, unless an earlier time is armed. The earlier wake finds no
    /// deadline due and arms the timer again, which is cheaper than moving the timer at every
    /// message.
    fn rearm(&mut self, now: Timestamp, ctx: &mut Context<Self>) {
        let Some(at) = self.behaviour.as_ref().and_then(ActorBehaviour::next_wake) else { return };
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
        let due = self.behaviour.as_ref().and_then(ActorBehaviour::next_wake).is_some_and(|at| at <= now);
        if due {
            self.guarded(now, ctx, |behaviour| behaviour.tick(now));
        } else {
            self.rearm(now, ctx);
        }
    }
}

/// Starts an actor that forwards its messages to the returned channel.
#[cfg(test)]
pub(crate) fn spawn_forwarder<M: Send + 'static>() -> (Mailbox<M>, tokio::sync::mpsc::UnboundedReceiver<M>) {
    struct Heard<M>(tokio::sync::mpsc::UnboundedSender<M>);

    impl<M: Send + 'static> ActorBehaviour for Heard<M> {
        type Message = M;
        fn handle(&mut self, _: Timestamp, message: M) {
            // The test may have ended and dropped the receiver.
            self.0.send(message).unwrap_or_default();
        }
        fn tick(&mut self, _: Timestamp) {}
        fn next_wake(&self) -> Option<Timestamp> {
            None
        }
    }

    let (sender, told) = tokio::sync::mpsc::unbounded_channel();
    let actor = spawn(Heard(sender), Arc::new(crate::clock::MonotonicClock), Sleeper::OUTSIDE, |_| {});
    (actor.mailbox(), told)
}
