// SPDX-License-Identifier: Apache-2.0
// The kernels of train.py. Matrices are row-major; one work item computes one element.

// out[row, col] = sum over k of in[row, k] * weights[k, col], through tanh when `activate`.
kernel void forward_layer(global const float *in, global const float *weights, global float *out,
			  int inner, int columns, int activate)
{
	int row = get_global_id(0), col = get_global_id(1);
	float sum = 0;
	for (int k = 0; k < inner; k++)
		sum += in[row * inner + k] * weights[k * columns + col];
	out[row * columns + col] = activate ? tanh(sum) : sum;
}

// Cross-entropy of a sample, and its gradient with respect to the scores.
kernel void softmax_loss(global const float *scores, global const int *labels,
			 global float *gradient, global float *losses, int classes)
{
	int row = get_global_id(0);
	float largest = -INFINITY, total = 0;
	for (int c = 0; c < classes; c++)
		largest = fmax(largest, scores[row * classes + c]);
	for (int c = 0; c < classes; c++)
		total += exp(scores[row * classes + c] - largest);
	for (int c = 0; c < classes; c++) {
		float p = exp(scores[row * classes + c] - largest) / total;
		gradient[row * classes + c] = p - (c == labels[row]);
		if (c == labels[row])
			losses[row] = -log(fmax(p, 1e-12f));
	}
}

// Back through the second layer and the tanh of the first.
kernel void backward_hidden(global const float *score_gradient, global const float *weights,
			    global const float *hidden, global float *hidden_gradient,
			    int hidden_units, int classes)
{
	int row = get_global_id(0), unit = get_global_id(1);
	float sum = 0;
	for (int c = 0; c < classes; c++)
		sum += score_gradient[row * classes + c] * weights[unit * classes + c];
	float activation = hidden[row * hidden_units + unit];
	hidden_gradient[row * hidden_units + unit] = sum * (1 - activation * activation);
}

// weights[k, col] -= rate / batch * sum over rows of values[row, k] * gradient[row, col]
kernel void update_weights(global float *weights, global const float *values,
			   global const float *gradient, int batch, int inner, int columns,
			   float rate)
{
	int k = get_global_id(0), col = get_global_id(1);
	float sum = 0;
	for (int row = 0; row < batch; row++)
		sum += values[row * inner + k] * gradient[row * columns + col];
	weights[k * columns + col] -= rate / batch * sum;
}
