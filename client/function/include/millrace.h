/* What a function in C links: -lmillrace_function. The program that `runtime: process` names is started
 * by a worker and serves calls with this; see docs/functions.md.
 *
 * What fails returns a negative number (or NULL), and millrace_error() says why. Handles are opaque,
 * made by this library and given back to it once. Every function may be called from any thread; a
 * handle must not be given back while another thread uses it. Nothing here ends the process.
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

/* Why the last function that failed on this thread did. Lives until the next that does. */
const char *millrace_error(void);

/* Greets the worker that started this process, over its standard input, which is empty from here on. */
int millrace_open(millrace_session **session);
void millrace_close(millrace_session *session);

/* Waits for a call: 1 with one, 0 when the worker wants no more of this process. An error at once while
 * the call before is neither finished nor failed. */
int millrace_next(millrace_session *session, millrace_call **call);

size_t millrace_input_count(const millrace_call *call);
int millrace_input_at(const millrace_call *call, size_t index, millrace_tensor *tensor);
int millrace_input(const millrace_call *call, const char *name, millrace_tensor *tensor);

/* What follows of a call is an error once it is answered.
 *
 * A name for data that nothing else in the cluster has. Asks nobody. */
int millrace_unique_id(millrace_call *call, char id[MILLRACE_ID_BYTES]);

/* Data by its name: an input's, what was stored, or an object of this worker. To be read only. */
int millrace_fetch(millrace_call *call, const char *id, millrace_buffer **buffer);

/* Room for data, all zeros, to be written in place and then stored. */
int millrace_create(millrace_call *call, size_t bytes, millrace_buffer **buffer);

/* Where the bytes are, until the buffer is stored or released: at a multiple of 64. Mapped when it is
 * first asked. */
void *millrace_data(millrace_buffer *buffer);
size_t millrace_bytes(const millrace_buffer *buffer);
void millrace_release(millrace_buffer *buffer);

/* Makes what was written an object of the worker, where it lies. The buffer has no bytes from here on,
 * and still has to be released. */
int millrace_store(millrace_call *call, const char *id, millrace_buffer *buffer);

/* Says that an output is this data. With `response` it is for the caller of the workflow: its bytes are
 * in the answer; without, it goes to whatever takes it next. */
int millrace_output(millrace_call *call, const char *name, const char *id, const char *datatype,
                    const int64_t *shape, size_t rank, int response);

/* Answers a call, with the outputs given or with an error. The call is given back, whatever comes of it. */
int millrace_finish(millrace_call *call);
int millrace_fail(millrace_call *call, const char *message);

#ifdef __cplusplus
}
#endif

#endif
