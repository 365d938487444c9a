//! The checks of gpu-check on the double: none fails, whatever the values are. This program plays the
//! part of gpu-check, because a check starts its program again for the other processes.
//!
//! Left out, because they need more than a GiB of memory or many seconds: 3 (4,096 descriptors), 9, 11
//! to 13, 16, 18, 24 and 27. Check 10 registers a private mapping, which the double refuses.

#[allow(dead_code, reason = "the checks have no scenarios")]
mod support;

use millrace_device::check;

const NUMBERS: [u8; 11] = [1, 2, 4, 5, 6, 7, 8, 14, 15, 19, 25];
/// Bytes of the GPU's memory: checks look at the size, and use little.
const MEMORY: &str = "17179869184";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["--role", role] => check::play(role).expect("the role is played"),
        ["--child", number] => {
            let check = check::checks().iter().find(|check| check.number.to_string() == number);
            check.expect("the check exists").run().expect("the check does not fail");
        }
        _ if arguments.contains(&"--list") => println!("checks: test"),
        _ => {
            // A number is the value of --test-threads.
            let is_filter = |argument: &&&str| !argument.starts_with('-') && argument.parse::<u32>().is_err();
            let filter = arguments.iter().find(is_filter);
            if filter.is_none_or(|filter| "checks".contains(filter)) {
                run_all();
            }
        }
    }
}

fn run_all() {
    let Some(driver) = support::driver() else { return };
    for number in NUMBERS {
        let output = support::again(driver.path())
            .args(["--child", &number.to_string()])
            .env("MILLRACE_DOUBLE_MEMORY", MEMORY)
            .output()
            .expect("this program runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "check {number}: {}\n{errors}", output.status);
        println!("check {number} ... ok");
    }
}
