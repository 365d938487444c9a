#![allow(clippy::unwrap_used)]
#![allow(unsafe_code, reason = "calls the C interface as a program in C would")]

use super::handles::note;
use super::*;

fn said() -> String {
    // SAFETY: the message is always a C string.
    unsafe { CStr::from_ptr(millrace_error()) }.to_str().unwrap().to_owned()
}

#[test]
fn null_arguments_are_errors_and_do_not_crash() {
    let none = ptr::null_mut::<millrace_call>();
    let mut place = ptr::null_mut();
    // SAFETY: every function accepts null.
    unsafe {
        assert_eq!(millrace_open(ptr::null_mut()), FAILED);
        assert_eq!(millrace_next(ptr::null_mut(), ptr::null_mut()), FAILED);
        assert_eq!(millrace_serve(None, ptr::null_mut()), FAILED);
        assert_eq!(millrace_unique_id(none, ptr::null_mut()), FAILED);
        assert_eq!(millrace_fetch(none, ptr::null(), &raw mut place), FAILED);
        assert_eq!(millrace_create(none, 1, &raw mut place), FAILED);
        assert_eq!(millrace_store(none, ptr::null(), ptr::null_mut()), FAILED);
        assert_eq!(millrace_finish(none), FAILED);
        assert!(said().contains("the call is null"), "{}", said());
        assert_eq!(millrace_fail(none, ptr::null()), FAILED);
        assert_eq!(CStr::from_ptr(millrace_reason()), c"INVALID");
        assert!(getters::millrace_input_name(none, 0).is_null());
        assert!(
            getters::millrace_input_shape(none, 0).is_null() && getters::millrace_wanted(none, 0).is_null()
        );
        assert_eq!((getters::millrace_input_rank(none, 0), getters::millrace_timeout_ms(none)), (0, 0));
        assert_eq!(CStr::from_ptr(millrace_reason()), c"NO_INPUT");
        assert_eq!(CStr::from_ptr(getters::millrace_request_id(none)), c"");
        assert!(millrace_data(ptr::null_mut()).is_null());
        assert_eq!((millrace_bytes(ptr::null()), millrace_input_count(none)), (0, 0));
        millrace_release(ptr::null_mut());
        millrace_close(ptr::null_mut());
    }
    assert!(place.is_null());
}

#[test]
fn a_panic_does_not_escape_and_each_thread_has_its_own_message() {
    assert_eq!(guarded(|| panic!("a bug")), FAILED);
    assert!(said().contains("a bug in millrace"), "{}", said());
    assert_eq!(std::thread::spawn(said).join().unwrap(), "");
    note(c"INVALID", "a zero\0inside");
    assert_eq!(said(), "a zero?inside");
}

#[test]
fn releasing_null_keeps_the_last_error() {
    note(c"DATA_LOST", "no worker has it");
    // SAFETY: both functions accept null.
    unsafe {
        millrace_release(ptr::null_mut());
        millrace_close(ptr::null_mut());
    }
    assert_eq!(said(), "no worker has it");
}
