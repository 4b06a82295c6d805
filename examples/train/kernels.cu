// What the training example computes on a GPU besides matrix products. kernels.ptx is made of this by
//   nvcc -ptx -arch=compute_75 kernels.cu -o kernels.ptx
// with its `.version` set to 7.0 afterwards, so that older drivers take it too.
// Rows are worked on by one warp each and columns by one thread each, always in the same order and
// without atomics: the same input gives the same bits.

__device__ static long thread_number() { return (long)blockIdx.x * blockDim.x + threadIdx.x; }

__device__ static float warp_sum(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
    return value;
}

__device__ static float warp_max(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, apart));
    return value;
}

// Row r of `out` is the row of the table for token r plus the row of its place in the sequence.
extern "C" __global__ void embed(const float *tokens, const float *table, const float *places, float *out,
                                 long rows, long width, long length) {
    long i = thread_number();
    if (i >= rows * width) return;
    long row = i / width, column = i % width;
    out[i] = table[(long)tokens[row] * width + column] + places[row % length * width + column];
}

extern "C" __global__ void embed_back_table(const float *tokens, const float *d, float *dtable,
                                            long rows, long width, long vocabulary) {
    long i = thread_number();
    if (i >= vocabulary * width) return;
    float token = (float)(i / width), sum = 0;
    for (long row = 0; row < rows; row++)
        if (tokens[row] == token) sum += d[row * width + i % width];
    dtable[i] += sum;
}

extern "C" __global__ void embed_back_places(const float *d, float *dplaces, long rows, long width, long length) {
    long i = thread_number();
    if (i >= length * width) return;
    float sum = 0;
    for (long row = i / width; row < rows; row += length) sum += d[row * width + i % width];
    dplaces[i] += sum;
}

// y = x * gain / rms(x) by rows; `scale` keeps 1 / rms.
extern "C" __global__ void rms_norm(const float *x, const float *gain, float *y, float *scale, long rows, long width) {
    long row = thread_number() / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * width, y += row * width;
    float squares = 0;
    for (long i = lane; i < width; i += 32) squares += x[i] * x[i];
    float factor = 1.0f / sqrtf(warp_sum(squares) / (float)width + 1e-5f);
    for (long i = lane; i < width; i += 32) y[i] = x[i] * factor * gain[i];
    if (lane == 0) scale[row] = factor;
}

extern "C" __global__ void rms_norm_back(const float *x, const float *gain, const float *scale, const float *dy, float *dx,
                                     long rows, long width) {
    long row = thread_number() / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * width, dy += row * width, dx += row * width;
    float factor = scale[row], dot = 0;
    for (long i = lane; i < width; i += 32) dot += x[i] * gain[i] * dy[i];
    float shared = warp_sum(dot) * factor * factor * factor / (float)width;
    for (long i = lane; i < width; i += 32) dx[i] += factor * gain[i] * dy[i] - shared * x[i];
}

extern "C" __global__ void rms_norm_back_gain(const float *x, const float *scale, const float *dy, float *dgain,
                                          long rows, long width) {
    long column = thread_number();
    if (column >= width) return;
    float sum = 0;
    for (long row = 0; row < rows; row++) sum += x[row * width + column] * scale[row] * dy[row * width + column];
    dgain[column] = sum;
}

extern "C" __global__ void relu(float *x, long count) {
    long i = thread_number();
    if (i < count) x[i] = fmaxf(x[i], 0.0f);
}

extern "C" __global__ void relu_back(const float *y, float *d, long count) {
    long i = thread_number();
    if (i < count && y[i] <= 0) d[i] = 0;
}

// Row r of each length x length square keeps its first r + 1 entries, which become their softmax.
extern "C" __global__ void softmax(float *scores, long rows, long length) {
    long row = thread_number() / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float *x = scores + row * length;
    long seen = row % length + 1;
    float most = -INFINITY, sum = 0;
    for (long i = lane; i < seen; i += 32) most = fmaxf(most, x[i]);
    most = warp_max(most);
    for (long i = lane; i < seen; i += 32) sum += expf(x[i] - most);
    sum = warp_sum(sum);
    for (long i = lane; i < length; i += 32) x[i] = i < seen ? expf(x[i] - most) / sum : 0.0f;
}

extern "C" __global__ void softmax_back(const float *chances, float *d, long rows, long length) {
    long row = thread_number() / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    chances += row * length, d += row * length;
    float dot = 0;
    for (long i = lane; i < length; i += 32) dot += chances[i] * d[i];
    dot = warp_sum(dot);
    for (long i = lane; i < length; i += 32) d[i] = chances[i] * (d[i] - dot);
}

// The loss of each row, and in place of the logits the gradient of the mean of all.
extern "C" __global__ void cross_entropy(float *logits, const float *targets, float *losses, long rows, long vocabulary) {
    long row = thread_number() / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float *x = logits + row * vocabulary;
    long target = (long)targets[row];
    float most = -INFINITY, sum = 0;
    for (long i = lane; i < vocabulary; i += 32) most = fmaxf(most, x[i]);
    most = warp_max(most);
    for (long i = lane; i < vocabulary; i += 32) sum += expf(x[i] - most);
    sum = warp_sum(sum);
    if (lane == 0) losses[row] = logf(sum) + most - x[target];
    __syncwarp();
    for (long i = lane; i < vocabulary; i += 32)
        x[i] = (expf(x[i] - most) / sum - (i == target ? 1.0f : 0.0f)) / (float)rows;
}

extern "C" __global__ void adam(float *weights, const float *gradient, float *first, float *second, long count,
                                float rate, float first_left, float second_left) {
    long i = thread_number();
    if (i >= count) return;
    float g = gradient[i];
    first[i] = 0.9f * first[i] + 0.1f * g;
    second[i] = 0.99f * second[i] + 0.01f * g * g;
    weights[i] -= rate * (first[i] / first_left) / (sqrtf(second[i] / second_left) + 1e-8f);
}
