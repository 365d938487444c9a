//! The check that every answer is right: it answers the client's own request, with the bytes that
//! the function returned before the faults.

use super::requests::{Ended, Request};
use crate::report::Check;

const NAME: &str = "every answer is right";

/// Judges all answers.
#[must_use]
pub fn check(requests: &[Request]) -> Check {
    let wrong = |request: &Request| match &request.how {
        Ended::Wrong(why) => Some(request.line(why)),
        Ended::Right | Ended::Refused(_) | Ended::GivenUp(_) => None,
    };
    let right = requests.iter().filter(|request| request.how == Ended::Right).count();
    let wrong: Vec<String> = requests.iter().filter_map(wrong).collect();
    Check::of(NAME, format!("{right} of {} answers", right + wrong.len()), wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::requests::request;
    use crate::report::Verdict;

    #[test]
    fn a_wrong_answer_is_caught_and_a_missing_one_is_not_counted() {
        let lost = || request(Ended::GivenUp("late".into()), &[]);
        let check_of = |how| check(&[request(how, &[]), lost()]);
        assert_eq!(check_of(Ended::Wrong("other bytes".into())).verdict, Verdict::Fail);
        let held = check_of(Ended::Right);
        assert_eq!((held.verdict, held.detail.as_str()), (Verdict::Pass, "1 of 1 answers"));
    }
}
