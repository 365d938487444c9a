//! Client sessions: the last write of each client and its answer. A repeated write gets the same
//! answer and changes nothing.
//!
//! Sessions are bounded in two ways. A session ends [`SESSION_TTL`] of stamped time after its last
//! write. Beyond [`SESSIONS_MAX`] sessions, the least recently used session is evicted. A repeat that
//! arrives after its session has ended is a new write, so a client that retries for longer must
//! send the resource version.

use std::time::Duration;

use imbl::{OrdMap, OrdSet};
use millrace_types::Digest;
pub use millrace_types::limits::SESSIONS_MAX;
use serde::{Deserialize, Serialize};

use crate::caller::{CallerName, IdempotencyKey};
use crate::outcome::{CommandOutcome, CommandRefusal};
use crate::table::encoded_len;
use crate::time::UnixMillis;

/// Time in stamps for which a session is kept after its last write.
pub const SESSION_TTL: Duration = Duration::from_secs(3600);

/// The key of a session. The caller is part of the key, because two callers may choose the same
/// client id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct SessionKey {
    caller: CallerName,
    client: std::sync::Arc<str>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Session {
    seq: u64,
    /// The digest of the write, which tells a repeat from another write with the same key.
    command: Digest,
    outcome: CommandOutcome,
    used_at: UnixMillis,
}

/// Every client session. The encoded form is the list of sessions; the order of use is rebuilt.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "StoredSessions", into = "StoredSessions")]
pub(crate) struct Sessions {
    by_client: OrdMap<SessionKey, Session>,
    by_use: OrdSet<(UnixMillis, SessionKey)>,
    bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct StoredSessions(Vec<(SessionKey, Session)>);

impl From<StoredSessions> for Sessions {
    fn from(StoredSessions(sessions): StoredSessions) -> Self {
        let by_use = sessions.iter().map(|(key, session)| (session.used_at, key.clone())).collect();
        let bytes = sessions.iter().map(|(key, session)| row_bytes(key, session)).sum();
        Self { by_client: sessions.into_iter().collect(), by_use, bytes }
    }
}

impl From<Sessions> for StoredSessions {
    fn from(sessions: Sessions) -> Self {
        Self(sessions.by_client.into_iter().collect())
    }
}

impl Sessions {
    /// Returns the answer that a repeated write got before, or the refusal of an invalid key;
    /// `None` if the write is new.
    pub(crate) fn find_answer(
        &self,
        caller: &CallerName,
        key: &IdempotencyKey,
        command: Digest,
    ) -> Option<CommandOutcome> {
        let session = self.by_client.get(&SessionKey::new(caller, key))?;
        match key.seq.cmp(&session.seq) {
            std::cmp::Ordering::Greater => None,
            std::cmp::Ordering::Less => {
                Some(Err(CommandRefusal::KeyTooOld { seq: key.seq, last: session.seq }))
            }
            std::cmp::Ordering::Equal if session.command != command => {
                Some(Err(CommandRefusal::KeyReused { seq: key.seq }))
            }
            std::cmp::Ordering::Equal => Some(session.outcome.clone()),
        }
    }

    /// Stores the answer to a new write.
    pub(crate) fn store_answer(
        &mut self,
        caller: &CallerName,
        key: &IdempotencyKey,
        command: Digest,
        outcome: CommandOutcome,
        now: UnixMillis,
    ) {
        let client = SessionKey::new(caller, key);
        let session = Session { seq: key.seq, command, outcome, used_at: now };
        self.bytes += row_bytes(&client, &session);
        if let Some(old) = self.by_client.insert(client.clone(), session) {
            self.bytes -= row_bytes(&client, &old);
            self.by_use.remove(&(old.used_at, client.clone()));
        }
        self.by_use.insert((now, client));
        if self.by_client.len() > SESSIONS_MAX {
            self.forget_oldest();
        }
    }

    /// Drops the sessions that have expired.
    pub(crate) fn expire(&mut self, now: UnixMillis) {
        while self.by_use.get_min().is_some_and(|(used_at, _)| now.since(*used_at) > SESSION_TTL) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, client)) = self.by_use.remove_min()
            && let Some(session) = self.by_client.remove(&client)
        {
            self.bytes -= row_bytes(&client, &session);
        }
    }

    /// Whether the write is answered from its session: with the stored answer, or with the refusal
    /// of a key that is too old.
    pub(crate) fn has_answer(&self, caller: &CallerName, key: &IdempotencyKey) -> bool {
        self.by_client.get(&SessionKey::new(caller, key)).is_some_and(|session| key.seq <= session.seq)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether both orders hold the same sessions, within the bound, and the byte count matches.
    pub(crate) fn is_consistent(&self) -> bool {
        self.by_client.len() <= SESSIONS_MAX
            && self.bytes == self.by_client.iter().map(|(key, session)| row_bytes(key, session)).sum()
            && self.by_client.len() == self.by_use.len()
            && self
                .by_client
                .iter()
                .all(|(key, session)| self.by_use.contains(&(session.used_at, key.clone())))
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_client.len()
    }
}

/// Returns the bytes of an encoded session.
fn row_bytes(key: &SessionKey, session: &Session) -> u64 {
    encoded_len(key) + encoded_len(session) + 1
}

impl SessionKey {
    fn new(caller: &CallerName, key: &IdempotencyKey) -> Self {
        Self { caller: caller.clone(), client: key.client.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::CommandEffect;

    fn key(client: &str, seq: u64) -> IdempotencyKey {
        IdempotencyKey { client: client.into(), seq }
    }

    fn caller() -> CallerName {
        CallerName("alice".into())
    }

    fn remember(sessions: &mut Sessions, client: &str, seq: u64, at: u64) {
        let outcome = Ok(CommandEffect::Created { version: seq });
        sessions.store_answer(&caller(), &key(client, seq), Digest::of(b"a"), outcome, UnixMillis(at));
    }

    #[test]
    fn a_repeat_gets_the_first_answer_and_a_later_number_is_new() {
        let mut sessions = Sessions::default();
        remember(&mut sessions, "c", 5, 10);
        let recall =
            |seq, command: &[u8]| sessions.find_answer(&caller(), &key("c", seq), Digest::of(command));
        assert_eq!(recall(5, b"a"), Some(Ok(CommandEffect::Created { version: 5 })));
        assert_eq!(recall(6, b"a"), None);
        assert_eq!(recall(4, b"a"), Some(Err(CommandRefusal::KeyTooOld { seq: 4, last: 5 })));
        assert_eq!(recall(5, b"b"), Some(Err(CommandRefusal::KeyReused { seq: 5 })));
    }

    #[test]
    fn the_same_client_id_under_another_caller_is_another_session() {
        let mut sessions = Sessions::default();
        remember(&mut sessions, "c", 5, 10);
        let stranger = CallerName("bob".into());
        assert_eq!(sessions.find_answer(&stranger, &key("c", 5), Digest::of(b"a")), None);
    }

    #[test]
    fn sessions_end_by_stamped_time_counted_from_their_last_use() {
        let ttl = u64::try_from(SESSION_TTL.as_millis()).unwrap();
        let mut sessions = Sessions::default();
        remember(&mut sessions, "idle", 1, 0);
        remember(&mut sessions, "busy", 1, 0);
        remember(&mut sessions, "busy", 2, 1);
        sessions.expire(UnixMillis(ttl));
        assert_eq!(sessions.len(), 2);
        sessions.expire(UnixMillis(ttl + 1));
        assert_eq!(sessions.len(), 1);
        assert!(sessions.find_answer(&caller(), &key("busy", 2), Digest::of(b"a")).is_some());
        assert!(sessions.is_consistent());
    }

    #[test]
    fn the_least_recently_used_session_is_evicted_at_the_bound() {
        let mut sessions = Sessions::default();
        for n in 0..=SESSIONS_MAX as u64 {
            remember(&mut sessions, &format!("c{n}"), 1, n);
        }
        assert_eq!(sessions.len(), SESSIONS_MAX);
        assert!(sessions.find_answer(&caller(), &key("c0", 1), Digest::of(b"a")).is_none());
        assert!(sessions.find_answer(&caller(), &key("c1", 1), Digest::of(b"a")).is_some());
        assert!(sessions.is_consistent());
    }
}
