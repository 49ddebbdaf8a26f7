/* SPDX-License-Identifier: Apache-2.0 */
/* A library to be loaded late. plugin_step has two versions, as libraries that grew up have. */
int plugin_work(int n)
{
	return n * 3;
}

int plugin_step_old(int n)
{
	return n + 1;
}

int plugin_step_new(int n)
{
	return n + 2;
}

__asm__(".symver plugin_step_old, plugin_step@PLUGIN_1.0");
__asm__(".symver plugin_step_new, plugin_step@@PLUGIN_2.0");

static int plugin_chosen(int n)
{
	return n;
}

static void *choose(void)
{
	return plugin_chosen;
}

int plugin_indirect(int n) __attribute__((ifunc("choose")));
