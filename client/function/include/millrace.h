/* The C interface for a program that Millrace serves as a function (`runtime: process`). Link
 * -lmillrace_function (or libmillrace_function.a). A worker starts the program, and the program serves
 * calls through this library. See docs/guide/functions.md.
 *
 * Errors. A function that fails returns a negative number (or NULL, or 0 for a size).
 * millrace_error() and millrace_reason() then describe the error. No function ends the process.
 *
 * Ownership. The library creates each handle, and the program gives each handle back once: a session
 * with millrace_close, a call of millrace_next with millrace_finish or millrace_fail, a buffer with
 * millrace_release. Using a handle after that is undefined behaviour. A session must outlive its calls;
 * a buffer may outlive its call. Texts and shapes that a call returns belong to the call and are freed
 * with it. Texts passed in are copied.
 *
 * Threads. Any thread may call any function. Several threads may use one handle at a time, and wait
 * for each other where they must. No thread may use a handle while another thread gives it back. The
 * program must synchronise its own writes to the bytes of a buffer.
 */
#ifndef MILLRACE_H
#define MILLRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The size of the longest id in bytes, with the terminating zero. */
#define MILLRACE_ID_BYTES 128

typedef struct millrace_session millrace_session;
typedef struct millrace_call millrace_call;
typedef struct millrace_buffer millrace_buffer;

/* An input. Its pointers are valid as long as the call. */
typedef struct millrace_tensor {
    const char *name;
    const char *id;       /* the id to pass to millrace_fetch */
    const char *datatype; /* the protocol's name of the type: FP32, UINT8, ... */
    const int64_t *shape;
    size_t rank;
} millrace_tensor;

/* Returns the message of the last error on this thread, for people. The text is valid until the next
 * error on this thread. */
const char *millrace_error(void);

/* Returns the stable name of the last error on this thread, for programs to decide by. The text is valid
 * as long as the program runs.
 *   DATA_LOST    no worker has the data any longer: fetching it again will not help
 *   UNAVAILABLE  a worker that may have the data cannot be reached now: fetching it again may help
 *   TAKEN        data was stored under that id before
 *   NO_INPUT, NO_IDS, NO_MEMORY, ANSWERED, NO_WORKER, PEER_MISMATCH, INVALID, INTERNAL
 *   and "" before the first error */
const char *millrace_reason(void);

/* Greets the worker that started this process, over standard input, which is empty afterwards. The
 * caller owns the session and must close it. Call once per process, from any thread. */
int millrace_open(millrace_session **session);

/* Closes a session. NULL does nothing. No call of the session may be open. */
void millrace_close(millrace_session *session);

/* Waits for a call. Returns 1 with a call, which the caller must finish or fail. Returns 0 when the
 * worker needs this process no longer. Fails at once while the previous call is neither finished nor
 * failed. Any thread may call this function; a process has one call at a time. */
int millrace_next(millrace_session *session, millrace_call **call);

/* Opens a session and passes one call after another to `function`, with `context`, which may be any
 * pointer. Most programs use this function in place of the three above. Returns 0 when the worker needs
 * this process no longer. If `function` returns NULL, the call is finished with the outputs that were
 * set. If `function` returns a text, such as millrace_error(), the text is copied and the call fails
 * with it. `function` must not finish, fail or keep the call, and must not throw an exception. */
int millrace_serve(const char *(*function)(millrace_call *call, void *context), void *context);

/* Return the inputs of a call in the order in which they arrived: an input as a struct, or field by field.
 * `millrace_input` finds an input by name. The pointers belong to the call. Any thread may call these
 * functions while the call is open. */
size_t millrace_input_count(const millrace_call *call);
int millrace_input_at(const millrace_call *call, size_t index, millrace_tensor *tensor);
int millrace_input(const millrace_call *call, const char *name, millrace_tensor *tensor);
const char *millrace_input_name(const millrace_call *call, size_t index);
const char *millrace_input_id(const millrace_call *call, size_t index);
const char *millrace_input_datatype(const millrace_call *call, size_t index);
size_t millrace_input_rank(const millrace_call *call, size_t index);
const int64_t *millrace_input_shape(const millrace_call *call, size_t index);

/* Return the id of the request in the cluster, and the time that the request had left when it arrived.
 * The text belongs to the call. Any thread. */
const char *millrace_request_id(const millrace_call *call);
uint64_t millrace_timeout_ms(const millrace_call *call);

/* Return the names of the requested outputs. If there are none, all declared outputs are requested. The
 * text belongs to the call; an index beyond the last name returns NULL. Any thread. */
size_t millrace_wanted_count(const millrace_call *call);
const char *millrace_wanted(const millrace_call *call, size_t index);

/* Writes an id for data that nothing else in the cluster has to `id`, which the caller owns. Sends no
 * message. Any thread; no two calls return the same id. */
int millrace_unique_id(millrace_call *call, char id[MILLRACE_ID_BYTES]);

/* Returns the data of an id: an input, stored data, or an object of any worker. The data is read-only. The
 * caller owns the buffer, must release it, and may keep it beyond the call. Any thread; other threads
 * that ask the worker wait meanwhile. Lasts at most three quarters of the call's remaining time. */
int millrace_fetch(millrace_call *call, const char *id, millrace_buffer **buffer);

/* Allocates memory for data, all zeros, to be written in place and then stored. The caller owns the
 * buffer and must release it. Any thread. */
int millrace_create(millrace_call *call, size_t bytes, millrace_buffer **buffer);

/* Returns the address of the bytes, aligned to 64, valid until the buffer is stored or released. The first
 * call maps the memory. Returns NULL for a stored buffer. Any thread; the program must synchronise
 * access to the bytes. */
void *millrace_data(millrace_buffer *buffer);

/* Returns the number of bytes, 0 for a stored buffer. Any thread. */
size_t millrace_bytes(const millrace_buffer *buffer);

/* Releases a buffer, stored or not. NULL does nothing. */
void millrace_release(millrace_buffer *buffer);

/* Makes the written data an object of the worker, without a copy. The buffer has no bytes afterwards,
 * even after an error, and must still be released. Fails with TAKEN for an id that any call used before.
 * Any thread, but no thread may write to the buffer meanwhile. */
int millrace_store(millrace_call *call, const char *id, millrace_buffer *buffer);

/* Sets an output to stored data. With `response`, the output is for the caller of the workflow: its bytes
 * are in the response. Otherwise the data passes to the output's next consumer. The arguments are
 * copied. Any thread. */
int millrace_output(millrace_call *call, const char *name, const char *id, const char *datatype,
                    const int64_t *shape, size_t rank, int response);

/* Answer a call: with the outputs that were set, or with an error, whose message may be NULL. The call is
 * given back even after an error: no thread may use it afterwards. */
int millrace_finish(millrace_call *call);
int millrace_fail(millrace_call *call, const char *message);

#ifdef __cplusplus
}
#endif

#endif
