//! The check that every answer is right: it answers the client's own request, with the bytes that
//! the function returned before the faults.

use crate::history::{RequestRecord, RequestResult};
use crate::report::PromiseCheck;

const NAME: &str = "every answer is right";

/// Judges all answers.
#[must_use]
pub fn check(requests: &[RequestRecord]) -> PromiseCheck {
    let wrong = |request: &RequestRecord| match &request.how {
        RequestResult::Wrong(why) => Some(request.line(why)),
        RequestResult::Right | RequestResult::Refused(_) | RequestResult::GivenUp(_) => None,
    };
    let right = requests.iter().filter(|request| request.how == RequestResult::Right).count();
    let wrong: Vec<String> = requests.iter().filter_map(wrong).collect();
    PromiseCheck::of(NAME, format!("{right} of {} answers", right + wrong.len()), wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::requests::request;
    use crate::report::CheckVerdict;

    #[test]
    fn a_wrong_answer_is_caught_and_a_missing_one_is_not_counted() {
        let lost = || request(RequestResult::GivenUp("late".into()), &[]);
        let check_of = |how| check(&[request(how, &[]), lost()]);
        assert_eq!(check_of(RequestResult::Wrong("other bytes".into())).verdict, CheckVerdict::Fail);
        let held = check_of(RequestResult::Right);
        assert_eq!((held.verdict, held.detail.as_str()), (CheckVerdict::Pass, "1 of 1 answers"));
    }
}
