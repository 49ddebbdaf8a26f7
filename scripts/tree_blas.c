// SPDX-License-Identifier: Apache-2.0
/*
 * The functions of CBLAS that NumPy's core is linked to, for scripts/tree: a few kilobytes instead of
 * OpenBLAS. Sonde multiplies no matrices of floats; these are here because the library has to be
 * complete, and are right, but slow. Sizes are of 64 bits, names those of NumPy's wheels.
 */
#include <stddef.h>
#include <stdint.h>

typedef int64_t blas_int;
enum { ROW_MAJOR = 101, NO_TRANS = 111, CONJ_TRANS = 113, UPPER = 121 };

#define CONJ_REAL(x) (x)
#define CONJ_COMPLEX(x) (~(x)) /* GNU C: the conjugate */

/* Where a vector begins that is read with this step. */
static ptrdiff_t first_of(blas_int count, blas_int step)
{
	return step < 0 ? (ptrdiff_t)((1 - count) * step) : 0;
}

/* The place of an entry of op(A), whose rows or columns are `lead` entries apart. */
static ptrdiff_t entry(int order, int trans, blas_int row, blas_int column, blas_int lead)
{
	int by_row = (order == ROW_MAJOR) == (trans == NO_TRANS);

	return by_row ? row * lead + column : column * lead + row;
}

/*
 * SCALAR: how a factor is passed, GET: how it is read; CONJ: the conjugate of a value.
 */
#define FUNCTIONS(P, T, SCALAR, GET, CONJ)                                                         \
	static T P##_at(const T *a, int order, int trans, blas_int row, blas_int column,           \
			blas_int lead)                                                             \
	{                                                                                          \
		T value = a[entry(order, trans, row, column, lead)];                               \
                                                                                                   \
		return trans == CONJ_TRANS ? CONJ(value) : value;                                  \
	}                                                                                          \
	static void P##_put(T *to, T sum, T alpha, T beta)                                         \
	{                                                                                          \
		*to = beta == 0 ? alpha * sum : alpha * sum + beta * *to;                          \
	}                                                                                          \
	void scipy_cblas_##P##gemm64_(int order, int trans_a, int trans_b, blas_int m, blas_int n, \
				      blas_int k, SCALAR alpha, const void *a, blas_int lda,       \
				      const void *b, blas_int ldb, SCALAR beta, void *c,           \
				      blas_int ldc)                                                \
	{                                                                                          \
		for (blas_int i = 0; i < m; i++)                                                   \
			for (blas_int j = 0; j < n; j++) {                                         \
				T sum = 0;                                                         \
                                                                                                   \
				for (blas_int l = 0; l < k; l++)                                   \
					sum += P##_at(a, order, trans_a, i, l, lda) *              \
					       P##_at(b, order, trans_b, l, j, ldb);               \
				P##_put((T *)c + entry(order, NO_TRANS, i, j, ldc), sum,           \
					GET(T, alpha), GET(T, beta));                              \
			}                                                                          \
	}                                                                                          \
	void scipy_cblas_##P##gemv64_(int order, int trans, blas_int m, blas_int n, SCALAR alpha,  \
				      const void *a, blas_int lda, const void *x, blas_int incx,   \
				      SCALAR beta, void *y, blas_int incy)                         \
	{                                                                                          \
		blas_int rows = trans == NO_TRANS ? m : n, columns = trans == NO_TRANS ? n : m;    \
		const T *in = (const T *)x + first_of(columns, incx);                              \
		T *out = (T *)y + first_of(rows, incy);                                            \
                                                                                                   \
		for (blas_int i = 0; i < rows; i++) {                                              \
			T sum = 0;                                                                 \
                                                                                                   \
			for (blas_int j = 0; j < columns; j++)                                     \
				sum += P##_at(a, order, trans, i, j, lda) * in[j * incx];          \
			P##_put(out + i * incy, sum, GET(T, alpha), GET(T, beta));                 \
		}                                                                                  \
	}                                                                                          \
	void scipy_cblas_##P##syrk64_(int order, int uplo, int trans, blas_int n, blas_int k,      \
				      SCALAR alpha, const void *a, blas_int lda, SCALAR beta,      \
				      void *c, blas_int ldc)                                       \
	{                                                                                          \
		for (blas_int i = 0; i < n; i++)                                                   \
			for (blas_int j = 0; j < n; j++) {                                         \
				T sum = 0;                                                         \
                                                                                                   \
				if (i != j && (uplo == UPPER) != (j > i))                          \
					continue;                                                  \
				for (blas_int l = 0; l < k; l++)                                   \
					sum += ((const T *)a)[entry(order, trans, i, l, lda)] *    \
					       ((const T *)a)[entry(order, trans, j, l, lda)];     \
				P##_put((T *)c + entry(order, NO_TRANS, i, j, ldc), sum,           \
					GET(T, alpha), GET(T, beta));                              \
			}                                                                          \
	}                                                                                          \
	void scipy_cblas_##P##axpy64_(blas_int n, SCALAR alpha, const void *x, blas_int incx,      \
				      void *y, blas_int incy)                                      \
	{                                                                                          \
		const T *in = (const T *)x + first_of(n, incx);                                    \
		T *out = (T *)y + first_of(n, incy);                                               \
                                                                                                   \
		for (blas_int i = 0; i < n; i++)                                                   \
			out[i * incy] += GET(T, alpha) * in[i * incx];                             \
	}                                                                                          \
	static T P##_dot(blas_int n, const T *x, blas_int incx, const T *y, blas_int incy,         \
			 int conjugated)                                                           \
	{                                                                                          \
		T sum = 0;                                                                         \
                                                                                                   \
		x += first_of(n, incx);                                                            \
		y += first_of(n, incy);                                                            \
		for (blas_int i = 0; i < n; i++)                                                   \
			sum += (conjugated ? CONJ(x[i * incx]) : x[i * incx]) * y[i * incy];       \
		return sum;                                                                        \
	}

#define BY_VALUE(T, factor) (factor)
#define BY_POINTER(T, factor) (*(const T *)(factor))

FUNCTIONS(s, float, float, BY_VALUE, CONJ_REAL)
FUNCTIONS(d, double, double, BY_VALUE, CONJ_REAL)
FUNCTIONS(c, float _Complex, const void *, BY_POINTER, CONJ_COMPLEX)
FUNCTIONS(z, double _Complex, const void *, BY_POINTER, CONJ_COMPLEX)

#define REAL_DOT(P, T)                                                                             \
	T scipy_cblas_##P##dot64_(blas_int n, const T *x, blas_int incx, const T *y,               \
				  blas_int incy)                                                   \
	{                                                                                          \
		return P##_dot(n, x, incx, y, incy, 0);                                            \
	}

REAL_DOT(s, float)
REAL_DOT(d, double)

#define COMPLEX_DOT(P, T, NAME, CONJUGATED)                                                        \
	void scipy_cblas_##P##NAME##_sub64_(blas_int n, const void *x, blas_int incx,              \
					    const void *y, blas_int incy, void *result)            \
	{                                                                                          \
		*(T *)result = P##_dot(n, x, incx, y, incy, CONJUGATED);                           \
	}

COMPLEX_DOT(c, float _Complex, dotu, 0)
COMPLEX_DOT(c, float _Complex, dotc, 1)
COMPLEX_DOT(z, double _Complex, dotu, 0)
COMPLEX_DOT(z, double _Complex, dotc, 1)
