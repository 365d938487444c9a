/* A function in C. The output y is twice the input x, and the caller gets the sum of x. */

#include <millrace.h>
#include <stdio.h>

static const char *twice(millrace_call *call, void *context) {
    millrace_tensor input;
    millrace_buffer *x = NULL, *y = NULL, *sum = NULL;
    char y_id[MILLRACE_ID_BYTES], sum_id[MILLRACE_ID_BYTES];
    const int64_t one = 1;
    int result = -1;
    (void)context;

    if (millrace_input(call, "x", &input) < 0 || millrace_fetch(call, input.id, &x) < 0) goto end;
    size_t bytes = millrace_bytes(x);
    if (millrace_create(call, bytes, &y) < 0 || millrace_create(call, sizeof(float), &sum) < 0) goto end;

    const float *from = millrace_data(x);
    /* The buffer is the object's memory, so storing the object copies no byte. */
    float *to = millrace_data(y), *total = millrace_data(sum);
    if (!from || !to || !total) goto end;
    for (size_t i = 0; i < bytes / sizeof(float); i++) {
        to[i] = 2 * from[i];
        *total += from[i];
    }

    if (millrace_unique_id(call, y_id) < 0 || millrace_store(call, y_id, y) < 0) goto end;
    if (millrace_output(call, "y", y_id, "FP32", input.shape, input.rank, 0) < 0) goto end;
    if (millrace_unique_id(call, sum_id) < 0 || millrace_store(call, sum_id, sum) < 0) goto end;
    result = millrace_output(call, "sum", sum_id, "FP32", &one, 1, 1);
end:
    millrace_release(x);
    millrace_release(y);
    millrace_release(sum);
    return result < 0 ? millrace_error() : NULL;
}

int main(void) {
    if (millrace_serve(twice, NULL) == 0) return 0;
    fprintf(stderr, "%s\n", millrace_error());
    return 1;
}
