//! Waiting until functions can serve.

use std::time::Duration;

use millrace_client::messages as wire;
use millrace_proto::convert::function_key;

use crate::clock;
use crate::failure::Failure;
use crate::output::documents::status_word;
use crate::progress;
use crate::session::Session;

/// The first pause between two looks, and the longest: each pause is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// What a function's Ready condition means for one who waits.
#[derive(Debug, PartialEq, Eq)]
enum Readiness {
    Ready,
    /// It will not become ready by waiting.
    Hopeless(String),
    /// What it waits for.
    NotYet(String),
}

/// Waits until every function is ready, and returns them as they are then.
pub(super) async fn wait(
    functions: Vec<wire::Function>,
    session: &Session,
    timeout: Duration,
) -> Result<Vec<wire::Function>, Failure> {
    let deadline = clock::now() + timeout;
    let mut ready = Vec::with_capacity(functions.len());
    for mut function in functions {
        let spec = function.spec.clone().unwrap_or_default();
        let name = format!("function/{}", spec.name);
        let key = function_key(&spec.tenant, &spec.name).map_err(|failure| {
            Failure::failed(format!("the server's answer cannot be used: {}", failure.message))
        })?;
        let line = progress::waiting(format!("waiting for {name}"));
        let mut pause = FIRST_PAUSE;
        loop {
            let waits_for = match readiness(&function) {
                Readiness::Ready => break,
                Readiness::Hopeless(why) => {
                    return Err(Failure::failed(format!("{name} was applied but cannot serve: {why}")));
                }
                Readiness::NotYet(what) => what,
            };
            line.set_message(format!("waiting for {name}: {waits_for}"));
            if clock::now() >= deadline {
                let waited = humantime::format_duration(timeout);
                return Err(Failure::timed_out(format!("{name} is not ready after {waited}: {waits_for}"))
                    .hint(format!(
                        "it goes on by itself: look with 'millrace describe {name}', or give --wait=TIME"
                    )));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            function = session.admin.function(&key).await?;
        }
        line.finish_and_clear();
        ready.push(function);
    }
    Ok(ready)
}

fn readiness(function: &wire::Function) -> Readiness {
    let Some(condition) = function.conditions.iter().find(|condition| condition.r#type == "Ready") else {
        return Readiness::NotYet("no report of it yet".to_owned());
    };
    let why = match condition.message.as_str() {
        "" => condition.reason.clone(),
        message => format!("{}: {message}", condition.reason),
    };
    match (status_word(condition), condition.reason.as_str()) {
        ("True", _) => Readiness::Ready,
        (_, "PrepareFailed" | "Disabled") => Readiness::Hopeless(why),
        _ => Readiness::NotYet(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(status: wire::ConditionStatus, reason: &str, message: &str) -> Readiness {
        let condition = wire::Condition {
            r#type: "Ready".into(),
            status: status.into(),
            reason: reason.into(),
            message: message.into(),
        };
        readiness(&wire::Function { conditions: vec![condition], ..Default::default() })
    }

    #[test]
    fn tells_what_is_worth_waiting_for() {
        use wire::ConditionStatus::{False, True};
        assert_eq!(check(True, "Prepared", ""), Readiness::Ready);
        assert_eq!(check(False, "Preparing", ""), Readiness::NotYet("Preparing".into()));
        assert_eq!(check(False, "NoWorker", "none"), Readiness::NotYet("NoWorker: none".into()));
        assert_eq!(check(False, "PrepareFailed", "x"), Readiness::Hopeless("PrepareFailed: x".into()));
        assert_eq!(check(False, "Disabled", ""), Readiness::Hopeless("Disabled".into()));
        assert!(matches!(readiness(&wire::Function::default()), Readiness::NotYet(_)));
    }
}
