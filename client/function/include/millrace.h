/* What a function in C links: -lmillrace_function (or libmillrace_function.a). The program that
 * `runtime: process` names is started by a worker and serves calls with this; see docs/functions.md.
 *
 * What fails returns a negative number (or NULL, or 0 where a size is asked for), and millrace_error()
 * and millrace_reason() say why. Nothing here ends the process.
 *
 * Ownership. A handle is made by this library and given back to it once: a session with millrace_close,
 * a call of millrace_next with millrace_finish or millrace_fail, a buffer with millrace_release. Using one
 * after that is undefined. A session outlives its calls; a buffer may outlive its call. Text and shapes
 * that come out of a call belong to it, and are gone with it. Text that goes in is copied.
 *
 * Threads. Every function may be called from any thread, and several at a time with one handle, which
 * wait for each other where they must; but not while another thread gives that handle back. The bytes
 * of a buffer are the program's to guard while it writes them.
 */
#ifndef MILLRACE_H
#define MILLRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The room that an id takes, with its end. */
#define MILLRACE_ID_BYTES 128

typedef struct millrace_session millrace_session;
typedef struct millrace_call millrace_call;
typedef struct millrace_buffer millrace_buffer;

/* An input. What it points to lives as long as its call. */
typedef struct millrace_tensor {
    const char *name;
    const char *id;       /* what its data is fetched by */
    const char *datatype; /* the protocol's name: FP32, UINT8, ... */
    const int64_t *shape;
    size_t rank;
} millrace_tensor;

/* Why the last function that failed on this thread did, for people. Each thread has its own. Lives until
 * the next failure on this thread. */
const char *millrace_error(void);

/* The same as one of a few names, to decide by. Lives as long as the program.
 *   DATA_LOST    the data is nowhere any more: fetching it again will not help
 *   UNAVAILABLE  who may have it cannot be reached now: fetching it again may help
 *   TAKEN        something was stored under that id before
 *   NO_INPUT, NO_IDS, NO_MEMORY, ANSWERED, NO_WORKER, PEER_MISMATCH, INVALID, INTERNAL
 *   and "" before any failure */
const char *millrace_reason(void);

/* Greets the worker that started this process, over its standard input, which is empty from here on.
 * The session is the caller's, to be closed. Once in a process; from any thread. */
int millrace_open(millrace_session **session);

/* Gives a session back. NULL does nothing. No call of it may be open. */
void millrace_close(millrace_session *session);

/* Waits for a call: 1 with one, which is the caller's to finish or fail; 0 when the worker wants no more
 * of this process. An error at once while the call before is neither finished nor failed. From any
 * thread; one at a time has a call. */
int millrace_next(millrace_session *session, millrace_call **call);

/* What the main function of most programs does, in place of the three above: opens a session, and gives
 * one call after another to `function`, with `context`, which may be anything. 0 when the worker wants no
 * more of this process. Where `function` returns NULL, the call is finished with the outputs given; where
 * it returns a text, which is copied (millrace_error() will do), the call fails with that. The call is not
 * its to finish, to fail or to keep, and no exception may leave it. */
int millrace_serve(const char *(*function)(millrace_call *call, void *context), void *context);

/* The inputs of a call, as they came: all of one in a struct, or one thing at a time. What is pointed to
 * is the call's. Any thread, at any time while the call is open. `millrace_input` finds one by name. */
size_t millrace_input_count(const millrace_call *call);
int millrace_input_at(const millrace_call *call, size_t index, millrace_tensor *tensor);
int millrace_input(const millrace_call *call, const char *name, millrace_tensor *tensor);
const char *millrace_input_name(const millrace_call *call, size_t index);
const char *millrace_input_id(const millrace_call *call, size_t index);
const char *millrace_input_datatype(const millrace_call *call, size_t index);
size_t millrace_input_rank(const millrace_call *call, size_t index);
const int64_t *millrace_input_shape(const millrace_call *call, size_t index);

/* The cluster's name for the request, and what was left of its time when it came. The text is the
 * call's. Any thread. */
const char *millrace_request_id(const millrace_call *call);
uint64_t millrace_timeout_ms(const millrace_call *call);

/* The outputs that are wanted, by name; none: all that are declared. The text is the call's; NULL beyond
 * the last. Any thread. */
size_t millrace_wanted_count(const millrace_call *call);
const char *millrace_wanted(const millrace_call *call, size_t index);

/* A name for data that nothing else in the cluster has, written to `id`, which is the caller's. Asks
 * nobody. Any thread; no two get the same. */
int millrace_unique_id(millrace_call *call, char id[MILLRACE_ID_BYTES]);

/* Data by its name: an input's, what was stored, or an object of any worker. To be read only. The buffer
 * is the caller's, to be released, and may be kept beyond the call. Any thread; others that ask the
 * worker wait meanwhile. Takes at most three quarters of what is left of the call's time. */
int millrace_fetch(millrace_call *call, const char *id, millrace_buffer **buffer);

/* Room for data, all zeros, to be written in place and then stored. The buffer is the caller's, to be
 * released. Any thread. */
int millrace_create(millrace_call *call, size_t bytes, millrace_buffer **buffer);

/* Where the bytes are, until the buffer is stored or released: at a multiple of 64. Mapped when it is
 * first asked. NULL for one that is stored. Any thread; what is there is the program's to guard. */
void *millrace_data(millrace_buffer *buffer);

/* How many there are; 0 once it is stored. Any thread. */
size_t millrace_bytes(const millrace_buffer *buffer);

/* Gives a buffer back, stored or not. NULL does nothing. */
void millrace_release(millrace_buffer *buffer);

/* Makes what was written an object of the worker, where it lies. The buffer has no bytes from here on,
 * whatever comes of it, and still has to be released. TAKEN for an id that was used before, by whichever
 * call. Any thread, but none may write to the buffer meanwhile. */
int millrace_store(millrace_call *call, const char *id, millrace_buffer *buffer);

/* Says that an output is this data. With `response` it is for the caller of the workflow: its bytes are
 * in the answer; without, it goes to whatever takes it next. Everything is copied. Any thread. */
int millrace_output(millrace_call *call, const char *name, const char *id, const char *datatype,
                    const int64_t *shape, size_t rank, int response);

/* Answers a call, with the outputs given or with an error, whose text may be NULL. The call is given
 * back, whatever comes of it: no other thread may use it any more. */
int millrace_finish(millrace_call *call);
int millrace_fail(millrace_call *call, const char *message);

#ifdef __cplusplus
}
#endif

#endif
