//! The C interface. `include/millrace.h` documents each function; this module only crosses the
//! boundary. Handles are opaque. A function that fails returns a negative number and stores a
//! message. No panic escapes, and every function may be called from any thread.
#![allow(unsafe_code, reason = "a C interface: pointers come from the caller, as the header asks")]
#![allow(non_camel_case_types, reason = "the header's names")]
#![allow(unreachable_pub, reason = "reached by their names, from outside")]

mod getters;
mod handles;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use millrace_types::DataType;

use self::handles::{FAILED, OK, bad, data_id, give, give_back, guarded, handle, take, text};
use crate::call::Call;
use crate::error::Error;
use crate::memory::{Buffer, Room};
use crate::session::Session;

/// The size of the longest id in bytes, with the terminating zero.
const ID_BYTES: usize = 128;
/// The largest number of dimensions of a tensor.
const RANK_MAX: usize = 16;

pub struct millrace_session(Session);

pub struct millrace_call {
    call: Call,
    inputs: Vec<CInput>,
    request_id: CString,
    wanted: Vec<CString>,
}

struct CInput {
    name: CString,
    id: CString,
}

impl millrace_call {
    /// Converts a call, with its texts as C strings.
    fn new(call: Call) -> Result<Self, Error> {
        let c_text = |text: &str| CString::new(text).map_err(|_| bad("a name has a zero byte"));
        let inputs = call
            .inputs()
            .iter()
            .map(|input| Ok(CInput { name: c_text(&input.name)?, id: c_text(&input.id.to_string())? }));
        let inputs = inputs.collect::<Result<_, Error>>()?;
        let request_id = c_text(call.request_id())?;
        let wanted = call.wanted().iter().map(|name| c_text(name)).collect::<Result<_, Error>>()?;
        Ok(Self { call, inputs, request_id, wanted })
    }
}

pub struct millrace_buffer(Mutex<State>);

enum State {
    Reading(Buffer),
    Writing(Room),
    Stored,
}

#[repr(C)]
pub struct millrace_tensor {
    name: *const c_char,
    id: *const c_char,
    datatype: *const c_char,
    shape: *const i64,
    rank: usize,
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_error() -> *const c_char {
    // The text is valid until this thread's next failure.
    handles::message()
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_reason() -> *const c_char {
    // The text is valid as long as the program runs.
    handles::reason()
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_open(out: *mut *mut millrace_session) -> c_int {
    // SAFETY: the header's promises.
    guarded(|| unsafe { give(out, || Session::open().map(millrace_session)) })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_close(session: *mut millrace_session) {
    // SAFETY: the header's promises.
    unsafe { give_back(session) };
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_next(
    session: *mut millrace_session,
    out: *mut *mut millrace_call,
) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let session = unsafe { handle(session, "the session is null") }?;
        let Some(call) = session.0.next_call()? else { return Ok(OK) };
        // SAFETY: the header's promises.
        unsafe { give(out, || millrace_call::new(call)) }?;
        Ok(1)
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_serve(
    function: Option<unsafe extern "C" fn(*mut millrace_call, *mut c_void) -> *const c_char>,
    context: *mut c_void,
) -> c_int {
    guarded(|| {
        let function = function.ok_or_else(|| bad("the function is null"))?;
        let session = Session::open()?;
        while let Some(call) = session.next_call()? {
            let mut call = millrace_call::new(call)?;
            // SAFETY: the header's promise that `function` accepts these pointers.
            let problem = unsafe { function(&raw mut call, context) };
            match problem.is_null() {
                true => call.call.finish(),
                // SAFETY: not null, and the header's promise that it is a C string.
                false => call.call.fail(&unsafe { CStr::from_ptr(problem) }.to_string_lossy()),
            }?;
        }
        Ok(OK)
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_input_count(call: *const millrace_call) -> usize {
    // SAFETY: the header's promises.
    unsafe { call.as_ref() }.map_or(0, |call| call.inputs.len())
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_input_at(
    call: *const millrace_call,
    index: usize,
    out: *mut millrace_tensor,
) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let call = unsafe { handle(call, "the call is null") }?;
        let (Some(input), Some(names)) = (call.call.inputs().get(index), call.inputs.get(index)) else {
            return Err(bad("there is no input with this index: see millrace_input_count"));
        };
        if out.is_null() {
            return Err(bad("the pointer for the result is null"));
        }
        let tensor = millrace_tensor {
            name: names.name.as_ptr(),
            id: names.id.as_ptr(),
            datatype: c_name(input.datatype).as_ptr(),
            shape: input.shape.as_ptr(),
            rank: input.shape.len(),
        };
        // SAFETY: not null, and the header's promise that it points to a tensor.
        unsafe { out.write(tensor) };
        Ok(OK)
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_input(
    call: *const millrace_call,
    name: *const c_char,
    out: *mut millrace_tensor,
) -> c_int {
    let index = guarded(|| {
        // SAFETY: the header's promises.
        let call = unsafe { handle(call, "the call is null") }?;
        // SAFETY: the header's promises.
        let name = unsafe { text(name, "the name is null or not UTF-8") }?;
        let index = call.call.inputs().iter().position(|input| input.name == name);
        let index = index.ok_or_else(|| Error::NoInput(name.to_owned()))?;
        c_int::try_from(index).map_err(|_| bad("too many inputs"))
    });
    match usize::try_from(index) {
        // SAFETY: the header's promises.
        Ok(index) => unsafe { millrace_input_at(call, index, out) },
        Err(_failed) => FAILED,
    }
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_unique_id(call: *mut millrace_call, out: *mut c_char) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let id = unsafe { handle(call, "the call is null") }?.call.unique_id()?.to_string();
        if out.is_null() || id.len() >= ID_BYTES {
            return Err(bad("the buffer for the id is null or too small: pass MILLRACE_ID_BYTES bytes"));
        }
        // SAFETY: the header's promise of ID_BYTES bytes; the id with its terminating zero needs
        // fewer.
        unsafe {
            ptr::copy_nonoverlapping(id.as_ptr(), out.cast(), id.len());
            out.add(id.len()).write(0);
        }
        Ok(OK)
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_fetch(
    call: *mut millrace_call,
    id: *const c_char,
    out: *mut *mut millrace_buffer,
) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let (call, id) = unsafe { (handle(call, "the call is null")?, data_id(id)?) };
        let buffer = || call.call.fetch(&id).map(|it| millrace_buffer(Mutex::new(State::Reading(it))));
        // SAFETY: the header's promises.
        unsafe { give(out, buffer) }
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_create(
    call: *mut millrace_call,
    bytes: usize,
    out: *mut *mut millrace_buffer,
) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let call = unsafe { handle(call, "the call is null") }?;
        let room = || call.call.create(bytes).map(|it| millrace_buffer(Mutex::new(State::Writing(it))));
        // SAFETY: the header's promises.
        unsafe { give(out, room) }
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_data(buffer: *mut millrace_buffer) -> *mut c_void {
    let mut data = ptr::null_mut();
    guarded(|| {
        // SAFETY: the header's promises.
        let buffer = unsafe { handle(buffer, "the buffer is null") }?;
        data = match &mut *buffer.0.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Reading(buffer) => buffer.bytes()?.as_ptr().cast_mut().cast(),
            State::Writing(room) => room.as_mut_ptr().cast(),
            State::Stored => return Err(bad("the buffer is stored: fetch it by its id")),
        };
        Ok(OK)
    });
    data
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_bytes(buffer: *const millrace_buffer) -> usize {
    // SAFETY: the header's promises.
    let Some(buffer) = (unsafe { buffer.as_ref() }) else { return 0 };
    match &*buffer.0.lock().unwrap_or_else(PoisonError::into_inner) {
        State::Reading(buffer) => buffer.len(),
        State::Writing(room) => room.len(),
        State::Stored => 0,
    }
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_release(buffer: *mut millrace_buffer) {
    // SAFETY: the header's promises.
    unsafe { give_back(buffer) };
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_store(
    call: *mut millrace_call,
    id: *const c_char,
    buffer: *mut millrace_buffer,
) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let (call, id) = unsafe { (handle(call, "the call is null")?, data_id(id)?) };
        // SAFETY: the header's promises.
        let buffer = unsafe { handle(buffer, "the buffer is null") }?;
        let mut state = buffer.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*state, State::Writing(_)) {
            return Err(bad("the buffer is stored already, or was fetched: create another"));
        }
        if let State::Writing(room) = std::mem::replace(&mut *state, State::Stored) {
            call.call.store(&id, room)?;
        }
        Ok(OK)
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_output(
    call: *mut millrace_call,
    name: *const c_char,
    id: *const c_char,
    datatype: *const c_char,
    shape: *const i64,
    rank: usize,
    response: c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let (call, id) = unsafe { (handle(call, "the call is null")?, data_id(id)?) };
        // SAFETY: the header's promises.
        let (name, datatype) = unsafe {
            (
                text(name, "the name is null or not UTF-8")?,
                text(datatype, "the datatype is null or not UTF-8")?,
            )
        };
        let datatype: DataType = datatype.parse().map_err(|error| Error::Function(format!("{error}")))?;
        if rank > RANK_MAX || (shape.is_null() && rank > 0) {
            return Err(bad("the shape is null or has more than 16 dimensions"));
        }
        // SAFETY: the header's promise of `rank` elements; an empty shape is not read.
        let shape = if rank == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(shape, rank) } };
        match response {
            0 => call.call.output(name, &id, datatype, shape),
            _ => call.call.response(name, &id, datatype, shape),
        }?;
        Ok(OK)
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_finish(call: *mut millrace_call) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let call = unsafe { take(call, "the call is null") }?;
        call.call.finish().map(|()| OK)
    })
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_fail(call: *mut millrace_call, message: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the header's promises.
        let call = unsafe { take(call, "the call is null") }?;
        let message = match message.is_null() {
            true => "the function failed without a message".into(),
            // SAFETY: not null, and the header's promise that it is a C string.
            false => unsafe { CStr::from_ptr(message) }.to_string_lossy(),
        };
        call.call.fail(&message).map(|()| OK)
    })
}

/// Returns the protocol's name of a type as a C string.
const fn c_name(datatype: DataType) -> &'static CStr {
    match datatype {
        DataType::Bool => c"BOOL",
        DataType::Uint8 => c"UINT8",
        DataType::Uint16 => c"UINT16",
        DataType::Uint32 => c"UINT32",
        DataType::Uint64 => c"UINT64",
        DataType::Int8 => c"INT8",
        DataType::Int16 => c"INT16",
        DataType::Int32 => c"INT32",
        DataType::Int64 => c"INT64",
        DataType::Fp16 => c"FP16",
        DataType::Bf16 => c"BF16",
        DataType::Fp32 => c"FP32",
        DataType::Fp64 => c"FP64",
        DataType::Bytes => c"BYTES",
    }
}

#[cfg(test)]
mod tests;
