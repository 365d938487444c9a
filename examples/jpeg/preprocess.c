/* The second step of the workflow: converts pixels to the classifier's input, 8x8 values from 0 to 1, light ink
   on a dark ground. */

#include <millrace.h>
#include <stdio.h>

#define SIDE 8

/* Returns the mean brightness of a box of the picture. */
static float box(const uint8_t *pixels, int64_t width, int64_t top, int64_t bottom, int64_t left, int64_t right) {
    double sum = 0;
    for (int64_t y = top; y < bottom; y++)
        for (int64_t x = left; x < right; x++) {
            const uint8_t *rgb = pixels + 3 * (y * width + x);
            sum += 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2];
        }
    return (float)(sum / (double)((bottom - top) * (right - left)) / 255.0);
}

/* Returns NULL, or the reason of a failure. */
static const char *preprocess(millrace_call *call, void *context) {
    static const int64_t shape[] = {1, 1, SIDE, SIDE};
    const char *problem = NULL;
    millrace_tensor input;
    millrace_buffer *from = NULL, *to = NULL;
    const uint8_t *pixels;
    float *image;
    char id[MILLRACE_ID_BYTES];
    (void)context;

    if (millrace_input(call, "pixels", &input) < 0) return millrace_error();
    int64_t height = input.shape[0], width = input.shape[1];
    if (height < SIDE || width < SIDE) return "the picture is smaller than 8x8";
    if (millrace_fetch(call, input.id, &from) < 0 ||
        millrace_create(call, SIDE * SIDE * sizeof(float), &to) < 0 ||
        !(pixels = millrace_data(from)) || !(image = millrace_data(to))) {
        problem = millrace_error();
    } else {
        for (int64_t y = 0; y < SIDE; y++)
            for (int64_t x = 0; x < SIDE; x++)
                image[y * SIDE + x] = box(pixels, width, y * height / SIDE, (y + 1) * height / SIDE,
                                          x * width / SIDE, (x + 1) * width / SIDE);
        if (millrace_unique_id(call, id) < 0 || millrace_store(call, id, to) < 0 ||
            millrace_output(call, "image", id, "FP32", shape, 4, 0) < 0)
            problem = millrace_error();
    }
    millrace_release(from);
    millrace_release(to);
    return problem;
}

int main(void) {
    if (millrace_serve(preprocess, NULL) == 0) return 0;
    fprintf(stderr, "%s\n", millrace_error());
    return 1;
}
